"""`python -m pipeline.checkpoints`, as people and schedulers know it; the verb is pipeline/cli/checkpoints.py."""

from pipeline.cli.checkpoints import main

if __name__ == "__main__":
    main()
