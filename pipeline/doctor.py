"""`python -m pipeline.doctor`, as people and schedulers know it; the verb is pipeline/cli/doctor.py."""

from pipeline.cli.doctor import main

if __name__ == "__main__":
    main()
