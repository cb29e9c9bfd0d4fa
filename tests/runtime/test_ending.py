"""A command's end: its code, its output, its threads; and no abort by a native thread that asks for the interpreter's lock."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from pipeline.runtime.process.exit_codes import DONE, FAILED, USER_ERROR

WORK = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from pipeline.runtime.process.ending import run_to_exit

def main():
    pool = ThreadPoolExecutor(1)
    pool.submit(time.sleep, 0.05).add_done_callback(lambda _: sys.stdout.write("pool "))
    threading.Thread(target=lambda: (time.sleep(0.1), sys.stdout.write("thread "))).start()
    atexit.register(sys.stdout.write, "atexit")
    {end}

run_to_exit(main)
"""
NATIVE = """
import ctypes, sys, time
from pipeline.runtime.process.ending import run_to_exit

class Slow:  # gives the lock away during the finalization
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

slow = Slow()

def main():
    ctypes.PyDLL(sys.argv[1]).start()

{end}
"""
# As Arrow does when one of its threads releases a buffer: the frame that asks for the lock may not throw.
ASKS_FOR_THE_LOCK = """
#include <Python.h>
#include <thread>
static void ask() noexcept { for (;;) { PyGILState_STATE state = PyGILState_Ensure(); PyGILState_Release(state); } }
extern "C" void start() { std::thread(ask).detach(); }
"""


def run(code: str, *words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("end", "code", "printed"),
    [("pass", DONE, ""), ("sys.exit(2)", USER_ERROR, ""), ("sys.exit('no file')", FAILED, "no file\n")],
)
def test_a_command_waits_for_its_threads_and_keeps_its_exit_code_and_output(end: str, code: int, printed: str) -> None:
    assert run(WORK.format(end=end)) == (code, "pool thread atexit", printed)


def test_an_error_of_a_command_is_left_to_the_interpreter() -> None:
    code, _, printed = run(WORK.format(end="1 / 0"))
    assert code == FAILED and printed.endswith("ZeroDivisionError: division by zero\n")


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="since Python 3.14 such a thread hangs and nothing aborts")
def test_a_native_thread_that_asks_for_the_lock_does_not_abort_a_command_that_has_finished(tmp_path: Path) -> None:
    compiler, headers = shutil.which("g++"), sysconfig.get_paths()["include"]
    if compiler is None or not Path(headers, "Python.h").exists():
        pytest.skip("needs g++ and Python.h")
    (tmp_path / "ask.cpp").write_text(ASKS_FOR_THE_LOCK)
    library = str(tmp_path / "ask.so")
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{headers}", tmp_path / "ask.cpp", "-o", library], check=True)
    aborted, _, printed = run(NATIVE.format(end="main()"), library)
    assert aborted == -6 and "terminate called" in printed
    assert run(NATIVE.format(end="run_to_exit(main)"), library) == (DONE, "", "")
