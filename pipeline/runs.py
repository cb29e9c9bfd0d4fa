"""`python -m pipeline.runs`, as people and schedulers know it; the verb is pipeline/cli/runs.py."""

from pipeline.cli.runs import main

if __name__ == "__main__":
    main()
