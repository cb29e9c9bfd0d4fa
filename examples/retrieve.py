"""Ask a server for items; `python -m pipeline serve artifact=<a two-tower's artifact>` runs, and its /docs has the columns:

python -m examples.retrieve http://127.0.0.1:8000 user_id=7 user_group=3
"""

import json
import sys
from urllib.request import Request, urlopen


def retrieve(url: str, user: dict[str, str], k: int = 10, seen: list[str] | None = None) -> list[tuple[str, float]]:
    """(item, score) of the `k` best for raw columns of a user, without those that were `seen`, the best first."""
    body = json.dumps({"rows": [user], "k": k, "excluded": seen or []}).encode()
    with urlopen(Request(f"{url}/retrieve", body, {"Content-Type": "application/json"})) as answer:
        found = json.load(answer)
    return list(zip(found["items"][0], found["scores"][0], strict=True))


if __name__ == "__main__":
    address, *columns = sys.argv[1:]
    for item, score in retrieve(address, dict(column.split("=", 1) for column in columns)):
        print(f"{score:8.4f}  {item}")
