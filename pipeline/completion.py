"""`python -m pipeline.completion`, as people and schedulers know it; the verb is pipeline/cli/completion.py."""

from pipeline.cli.completion import main

if __name__ == "__main__":
    main()
