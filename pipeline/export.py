"""`python -m pipeline.export`, as people and schedulers know it; the verb is pipeline/cli/export.py."""

from pipeline.cli.export import main

if __name__ == "__main__":
    main()
