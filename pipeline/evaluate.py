"""`python -m pipeline.evaluate`, as people and schedulers know it; the verb is pipeline/cli/evaluate.py."""

from pipeline.cli.evaluate import main

if __name__ == "__main__":
    main()
