"""What a server says where uvicorn is not installed:  python -m tests.serving.without_uvicorn OVERRIDE ..."""

from __future__ import annotations

import sys

from tests.serving import servers

if __name__ == "__main__":
    sys.modules["uvicorn"] = None  # importing it is an ImportError
    servers.main()
