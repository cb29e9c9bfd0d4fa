"""A training as a sweep starts one, forked from a process that has the imports: python -m tests.support.trial WORDS"""

from tests.support.forks import run_as_this_process

if __name__ == "__main__":
    run_as_this_process("pipeline train")
