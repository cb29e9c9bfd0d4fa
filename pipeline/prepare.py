"""`python -m pipeline.prepare`, as people and schedulers know it; the verb is pipeline/cli/prepare.py."""

from pipeline.cli.prepare import main

if __name__ == "__main__":
    main()
