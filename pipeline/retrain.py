"""`python -m pipeline.retrain`, as people and schedulers know it; the verb is pipeline/cli/retrain.py."""

from pipeline.cli.retrain import main

if __name__ == "__main__":
    main()
