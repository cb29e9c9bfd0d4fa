"""`python -m pipeline.publish`, as people and schedulers know it; the verb is pipeline/cli/publish.py."""

from pipeline.cli.publish import main

if __name__ == "__main__":
    main()
