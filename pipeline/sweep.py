"""`python -m pipeline.sweep`, as people and schedulers know it; the verb is pipeline/cli/sweep.py."""

from pipeline.cli.sweep import main

if __name__ == "__main__":
    main()
