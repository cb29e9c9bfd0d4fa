"""`python -m pipeline.report`, as people and schedulers know it; the verb is pipeline/cli/report.py."""

from pipeline.cli.report import main

if __name__ == "__main__":
    main()
