"""`python -m pipeline.train`, as people and schedulers know it; the verb is pipeline/cli/train.py."""

from pipeline.cli.train import main

if __name__ == "__main__":
    main()
