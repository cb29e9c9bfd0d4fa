"""`python -m pipeline.serve`, as people and schedulers know it; the verb is pipeline/cli/serve.py."""

from pipeline.cli.serve import main

if __name__ == "__main__":
    main()
