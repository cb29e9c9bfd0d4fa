"""`python -m pipeline.inspect`, as people and schedulers know it; the verb is pipeline/cli/inspect.py."""

from pipeline.cli.inspect import main

if __name__ == "__main__":
    main()
