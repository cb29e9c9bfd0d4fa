"""`python -m pipeline.check_nodes`, as people and schedulers know it; the verb is pipeline/cli/check_nodes.py."""

from pipeline.cli.check_nodes import main

if __name__ == "__main__":
    main()
