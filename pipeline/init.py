"""`python -m pipeline.init`, as people and schedulers know it; the verb is pipeline/cli/init.py."""

from pipeline.cli.init import main

if __name__ == "__main__":
    main()
