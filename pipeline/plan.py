"""`python -m pipeline.plan`, as people and schedulers know it; the verb is pipeline/cli/plan.py."""

from pipeline.cli.plan import main

if __name__ == "__main__":
    main()
