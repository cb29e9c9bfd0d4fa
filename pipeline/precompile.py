"""`python -m pipeline.precompile`, as people and schedulers know it; the verb is pipeline/cli/precompile.py."""

from pipeline.cli.precompile import main

if __name__ == "__main__":
    main()
