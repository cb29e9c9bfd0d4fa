"""Several commands of TorchX for the price of loading it once: each runs in a fork of one process that has."""

from __future__ import annotations

import json
import subprocess
from typing import NamedTuple

LOAD_ONCE = """
import json, os, sys
from torchx.cli.main import main
for words in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.exit(main(words))
    code = os.waitstatus_to_exitcode(os.wait()[1])
    for stream in (sys.stdout, sys.stderr):
        print(end=f"\\0{code}\\0", file=stream, flush=True)
"""


class Answer(NamedTuple):
    code: int
    out: str
    err: str


def words_for(*commands: list[str]) -> list[str]:
    """What python is given to run `torchx` with each of the commands."""
    return ["-c", LOAD_ONCE, json.dumps(commands)]


def answers_of(done: subprocess.CompletedProcess[str]) -> list[Answer]:
    assert done.returncode == 0, done.stderr
    (outs, errs) = (text.split("\0")[:-1] for text in (done.stdout, done.stderr))
    return [Answer(int(code), out, err) for out, code, err in zip(outs[::2], outs[1::2], errs[::2], strict=True)]
