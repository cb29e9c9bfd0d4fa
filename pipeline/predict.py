"""`python -m pipeline.predict`, as people and schedulers know it; the verb is pipeline/cli/predict.py."""

from pipeline.cli.predict import main

if __name__ == "__main__":
    main()
