"""`python -m pipeline.calibrate`, as people and schedulers know it; the verb is pipeline/cli/calibrate.py."""

from pipeline.cli.calibrate import main

if __name__ == "__main__":
    main()
