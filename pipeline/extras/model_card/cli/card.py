"""Show the model card of an artifact:  python -m pipeline card artifact=artifacts/quickstart

Each export writes the card into the artifact, as card.md and card.json. This command adds what came after the export:
the newest delta, and the registry's version. format=json prints the card as JSON, format=schema its JSON Schema.
"""

from __future__ import annotations

import json

from pipeline.cli.verb import verb
from pipeline.extras.model_card.config import ShowCardJob
from pipeline.retraining.find_artifact import find_artifact
from pipeline.runtime.storage import storage


def show_card(job: ShowCardJob) -> str:
    """Return the card as text. Raises ServingError or DamagedError if there is no artifact, or it is damaged."""
    from pipeline.extras.model_card.card import json_schema
    from pipeline.extras.model_card.markdown import to_markdown
    from pipeline.extras.model_card.show import card_of_artifact

    if job.format == "schema":
        text = json.dumps(json_schema(), indent=1)
    else:
        card = card_of_artifact(find_artifact(str(job.artifact)).path)
        text = card.to_json() if job.format == "json" else to_markdown(card)
    if job.output is None:
        return text.rstrip("\n")
    storage.publish_text(job.output, text.rstrip("\n") + "\n")
    return f"written to  {job.output}"


main = verb("card", ShowCardJob, describe=str)(show_card)
