"""A prediction over a stand-in that stops after so many rows until a file is there:  python -m ... OVERRIDE ... FREE_ROWS FILE"""

from __future__ import annotations

import sys

from pipeline.cli.verb import Verb
from pipeline.config.jobs.evaluate import PredictJob
from pipeline.serving.scoring import score_files
from pipeline.serving.scoring.predict import describe, predict
from tests.serving.stand_in import StandIn


def main() -> None:
    score_files.BLOCK_BYTES = 10_000
    scorer = StandIn(held_by=sys.argv.pop(), free_rows=int(sys.argv.pop()))
    Verb(PredictJob, lambda job: predict(job, lambda _: scorer), "", describe, handles_sigterm=True).main()


if __name__ == "__main__":
    main()
