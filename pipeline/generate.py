"""`python -m pipeline.generate`, as people and schedulers know it; the verb is pipeline/cli/generate.py."""

from pipeline.cli.generate import main

if __name__ == "__main__":
    main()
