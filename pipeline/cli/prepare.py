"""Turn raw click logs into a data set:  python -m pipeline.prepare data=criteo_kaggle source=train.txt"""

from __future__ import annotations

from pipeline.cli.command_line import run_verb
from pipeline.config.jobs import PrepareJob
from pipeline.data.prepare.run import describe, prepare


def main() -> None:
    run_verb(PrepareJob, prepare, __doc__, describe)


if __name__ == "__main__":
    main()
