"""`python -m pipeline.registry`, as people and schedulers know it; the verb is pipeline/cli/registry.py."""

from pipeline.cli.registry import main

if __name__ == "__main__":
    main()
