"""Commands in processes that need import neither torch nor the pipeline, because they fork from one that has.

A rank's own start is 8 CPU seconds of imports otherwise. `python -m tests.support.forks FD` is the process that they fork
from: it takes requests on the listening socket FD, and ends with its children when its standard input does.
What a process imports, or warns of while it does, and the memory that it takes are shown by real ones (subprocess).
"""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from multiprocessing import process
from pathlib import Path
from typing import NoReturn

from tests.support.own_folder import REPOSITORY, find_tests_from_any_folder

ADDRESS = "TESTS_FORK_SERVER"  # environment variable: the server of the session, where one has been started
CPU_REPORT = "TESTS_CPU_REPORT"  # environment variable: where a command's CPU seconds are written when it has ended
PRELOADED = "TESTS_PRELOADED"  # environment variable: the module that the server imports
PASSED = "TESTS_PASSED_FD"  # environment variable of a command: the file descriptor that its starter passed
find_tests_from_any_folder()
ENVIRONMENT = dict(os.environ)  # not that of the test which happens to start the server
_address = os.environ.get(ADDRESS, "")
_server: subprocess.Popen[bytes] | None = None


def preload(module: str) -> None:
    """Have the server import `module` instead of tests.support.preloaded; before it starts."""
    assert _server is None, "the server that commands fork from has started"
    ENVIRONMENT[PRELOADED] = module


def server_address() -> str:
    """Of the server, which starts unless the session has one: of several test processes, the one that starts them has."""
    global _server, _address
    if _address:
        return _address
    address = f"{tempfile.mkdtemp(prefix='forks-')}/server"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(64)
        words = [sys.executable, "-m", "tests.support.forks", str(listener.fileno())]
        _server = subprocess.Popen(
            words, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=ENVIRONMENT, cwd=REPOSITORY
        )
    _address = address
    return address


def end_server() -> None:
    """A process that nobody waits for is in nobody's CPU time."""
    if _server is not None:
        _server.communicate()
        shutil.rmtree(Path(_address).parent)


class WarmCommand:
    """`python -m MODULE WORDS`, where MODULE may be `pipeline VERB`; used as a subprocess.Popen is. Output goes to the file descriptors given, else to pipes."""

    def __init__(
        self,
        module: str,
        words: Sequence[object] = (),
        env: dict[str, str] | None = None,
        output: tuple[int, int] | None = None,
        passed: int | None = None,
    ) -> None:
        address = server_address()
        pipes = None if output else (os.pipe(), os.pipe())
        ends = output or tuple(end for _, end in pipes)
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server.connect(address)
        module, *first = module.split()
        request = {
            "module": module,
            "words": [*first, *map(str, words)],
            "env": {**os.environ, **(env or {})},
            "folder": os.getcwd(),
            "authkey": process.current_process().authkey.hex(),
        }
        socket.send_fds(self._server, [json.dumps(request).encode()], [*ends, *([] if passed is None else [passed])])
        answer = self._server.recv(64)
        assert answer, "the server that commands fork from has ended: see its error"
        self.pid, self.returncode = int(answer), None
        if pipes:
            for _, end in pipes:
                os.close(end)
            self.stdout, self.stderr = (os.fdopen(begin, errors="replace") for begin, _ in pipes)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._server.settimeout(timeout)
            try:
                answer = self._server.recv(64)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0) from None
            assert answer, "the server that commands fork from has ended"
            self.returncode = int(answer)
            self._server.close()
        return self.returncode

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        said = ["", ""]

        def read(index: int) -> None:
            said[index] = (self.stdout, self.stderr)[index].read()

        readers = [threading.Thread(target=read, args=(index,)) for index in (0, 1)]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        return said[0], said[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_warm(module: str, *words: object, timeout: float = 300.0) -> subprocess.CompletedProcess[str]:
    """As subprocess.run of `python -m MODULE WORDS` with its output captured."""
    command = WarmCommand(module, words)
    try:
        out, err = command.communicate(timeout)
    finally:
        command.kill()
    return subprocess.CompletedProcess([module, *map(str, words)], command.wait(), out, err)


def run_as_this_process(module: str) -> NoReturn:
    """Stand for a command with this process's words: signals go there, and this process ends as it does."""
    command = WarmCommand(module, sys.argv[1:], output=(1, 2))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, _: os.kill(command.pid, number))
    code = command.wait()
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def _serve(listener: socket.socket) -> tuple[dict, list[int]]:
    """Returns in the child of each request, with what it is to be."""
    wake, woken = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the tests decide
    signal.set_wakeup_fd(woken)
    clients: dict[socket.socket, int] = {}
    starters: dict[int, dict] = {}  # process -> environment that it was started with
    selector = selectors.DefaultSelector()
    for each in (listener, wake, 0):
        selector.register(each, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                client, _ = listener.accept()
                content, fds, _, _ = socket.recv_fds(client, 1 << 20, 8)
                if (pid := os.fork()) == 0:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    for each in (listener, client, *clients):
                        each.close()
                    os.close(wake)
                    os.close(woken)
                    return json.loads(content), fds
                for fd in fds:
                    os.close(fd)
                clients[client] = pid
                starters[pid] = json.loads(content)["env"]
                selector.register(client, selectors.EVENT_READ)
                client.send(str(pid).encode())
            elif key.fileobj == wake:
                os.read(wake, 1 << 16)
                _reap(clients, selector, starters)
            elif key.fileobj == 0:
                for pid in clients.values():
                    os.kill(pid, signal.SIGKILL)
                for pid in clients.values():
                    os.waitpid(pid, 0)
                sys.exit()
            elif key.fileobj in clients:  # its starter has ended
                os.kill(clients[key.fileobj], signal.SIGKILL)
                selector.unregister(key.fileobj)


def _reap(clients: dict[socket.socket, int], selector: selectors.BaseSelector, starters: dict[int, dict]) -> None:
    by_pid = {pid: client for client, pid in clients.items()}
    for pid, client in by_pid.items():
        found, status, used = os.wait4(pid, os.WNOHANG)
        if not found:
            continue
        environment = starters.pop(pid)
        if CPU_REPORT in environment:
            test = environment.get("PYTEST_CURRENT_TEST", "").partition(" (")[0]
            line = {"test": test, "phase": "command", "cpu_s": round(used.ru_utime + used.ru_stime, 3)}
            with open(environment[CPU_REPORT], "a") as file:
                file.write(json.dumps(line) + "\n")
        del clients[client]
        if client in {key.fileobj for key in selector.get_map().values()}:
            selector.unregister(client)
            client.send(str(os.waitstatus_to_exitcode(status)).encode())
        client.close()


def _become(request: dict, fds: list[int]) -> None:
    import numpy as np

    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in zip((1, 2), fds, strict=False):
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(number, "w"), write_through=True) for number in (1, 2))
    os.environ.clear()
    os.environ.update(request["env"])
    if len(fds) > 2:
        os.environ[PASSED] = str(fds[2])
    os.chdir(request["folder"])
    process.current_process().authkey = bytes.fromhex(request["authkey"])
    np.random.seed()  # Python's generator is seeded anew in every child
    sys.argv = [request["module"], *request["words"]]
    main_module = "pipeline.__main__" if request["module"] == "pipeline" else request["module"]
    sys.modules.pop(main_module, None)
    code = _code_of(main_module)
    atexit._run_exitfuncs()
    os._exit(code)  # the interpreter's own end takes half a second


def _code_of(module: str) -> int:
    """Run it as the interpreter does, to the end of its threads; its exit code."""
    try:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main(listener: str) -> None:
    importlib.import_module(os.environ.get(PRELOADED, "tests.support.preloaded"))

    gc.freeze()  # a collection, that of the end too, would copy every page of what was imported
    _become(*_serve(socket.socket(fileno=int(listener))))


if __name__ == "__main__":
    main(sys.argv[1])
