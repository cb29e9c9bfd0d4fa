"""Define a verb: its job, the function that does it, and how it behaves as a process.

A verb is one file that calls `verb`. Those of this package lie beside this file; `python -m pipeline` finds them there, and
those of installed packages and plugins in the registry (kind "verb"):

    @dataclass
    class CountJob:
        source: str = "???"

    def count(job: CountJob) -> int: ...

    main = verb("count", CountJob, describe=lambda rows: f"{rows} rows")(count)

Values come from conf/<name>.yaml where there is such a file, else from the job's own defaults.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from pipeline.cli.command_line import is_rank_zero, parse_command_line, print_user_errors
from pipeline.cli.words import Command, read_words
from pipeline.config.jobs.names import CONFIG_NAMES
from pipeline.config.registry import register
from pipeline.config.training import LoggerConfig, TrainerConfig
from pipeline.devices.cpu.process import computes_here, find_kernel_cache, use_huge_pages, wait_briefly
from pipeline.runtime.logs import configure_logging
from pipeline.runtime.process import preemption, watchdog
from pipeline.runtime.process.exit_codes import FAILED, INTERRUPTED
from pipeline.runtime.process.failures import masked_traceback, write_error_file
from pipeline.runtime.process.processes import die_with_parent
from pipeline.runtime.process.stdout import write_out

Job = TypeVar("Job")
Result = TypeVar("Result")
Main = Callable[[], None]


def _output_of(job: Any) -> str:
    return str(getattr(job, "run_dir", "") or getattr(job, "run", "") or getattr(job, "output", ""))


@dataclass(frozen=True)
class Verb(Generic[Job, Result]):
    """How a function becomes a process.

    describe: what rank 0 prints of the result. validate: checks the job before anything heavy is imported.
    commands, default: the words that may stand before key=value (see Command). written_to: the folder or file that errors of
    the file system are about. runs_on_ranks: it may run on many ranks and for long, so it has a watchdog and ends with the
    agent that started it. when_interrupted: what is there after Ctrl-C. handles_sigterm: SIGTERM asks it to put away what it holds, and ends it there.
    runs_kernels: our CPU kernels run beside OpenMP's threads, which then have to sleep soon, on tensors that huge pages suit.
    """

    job: type[Job]
    run: Callable[[Job], Result]
    doc: str
    describe: Callable[[Result], str] | None = None
    validate: Callable[[Job], object] | None = None
    when_interrupted: Callable[[Job], str] = lambda job: "the same command starts over"
    commands: tuple[Command, ...] = ()
    default: str = ""
    written_to: Callable[[Job], str] = _output_of
    runs_on_ranks: bool = False
    handles_sigterm: bool = False
    runs_kernels: bool = False

    def main(self) -> None:
        """Compose the job of sys.argv, run it, and print on rank 0 what came of it. Ends the process on every error."""
        try:
            job = self._read_job()
        except KeyboardInterrupt:
            _say("\ninterrupted")
            sys.exit(INTERRUPTED)
        if job is not None:
            self._run_as_process(job)

    def _read_job(self) -> Job | None:
        """None where a command that needs none was run."""
        self._prepare_process()
        with print_user_errors():
            words = read_words(sys.argv[1:], self.commands, self.default)
            command = next((command for command in self.commands if command.name == words.command), None)
            if command is not None and command.run is not None and "--help" not in words.flags:
                command.run(words)
                return None
        takes_command = any(field.name == "command" for field in fields(self.job))  # type: ignore[arg-type]
        overrides = words.overrides() if takes_command else words.remaining()
        return parse_command_line(self.job, self.doc, overrides, self.validate)

    def _run_as_process(self, job: Job) -> None:
        rank = int(os.environ.get("RANK", "0"))
        logs = getattr(job, "logger", None)
        configure_logging(rank, logs.format if isinstance(logs, LoggerConfig) else "text")
        if self.runs_on_ranks:
            trainer = getattr(job, "trainer", None)
            watchdog.start(rank, trainer.limits() if isinstance(trainer, TrainerConfig) else None)
        try:
            self._run(job)
        except KeyboardInterrupt:
            _say(f"\ninterrupted; {self.when_interrupted(job)}")
            sys.exit(INTERRUPTED)
        except preemption.Preempted:
            _say("ended by SIGTERM, nothing had to be saved; the same command goes on")
            raise
        except Exception as error:
            # Not left to the interpreter, nor to torchelastic's @record: neither hides credentials.
            write_error_file(f"{type(error).__name__}: {error}", error)
            print(masked_traceback(error), file=sys.stderr, end="", flush=True)
            sys.exit(FAILED)
        finally:
            watchdog.end()

    def _prepare_process(self) -> None:
        if self.runs_kernels:
            find_kernel_cache()
            if not self.runs_on_ranks or computes_here(sys.argv[1:]):
                wait_briefly()
                use_huge_pages()
        if self.handles_sigterm:
            preemption.listen()
        # A rank does not outlive its agent, unless the agent is ending it already.
        if self.runs_on_ranks and "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
            preemption.when_requested(lambda: die_with_parent(False))

    def _run(self, job: Job) -> None:
        with print_user_errors(self.written_to(job)):
            result = self.run(job)
            if self.describe is not None and is_rank_zero():
                write_out(self.describe(result))


def goes_on(job: object) -> str:
    """For verbs that take up what an earlier call has left."""
    return "the same command goes on from what is saved"


def verb(name: str, job: type[Job], **options: Any) -> Callable[[Callable[[Job], Result]], Main]:
    """Register a function as the verb `name`; gives the main() of its file. `options` are the fields of Verb.

    The help text is the docstring of the module that calls, or `doc`.
    """
    CONFIG_NAMES.setdefault(job, name)

    def define(run: Callable[[Job], Result]) -> Main:
        module = sys._getframe(1).f_globals
        doc = options.pop("doc", module.get("__doc__") or run.__doc__ or "")
        defined = Verb(job, run, doc, **options)

        def main() -> None:
            defined.main()

        main.__module__, main.__qualname__ = module["__name__"], name
        main.verb = defined  # type: ignore[attr-defined]
        return register("verb", name)(main)

    return define


def _say(text: str) -> None:
    if is_rank_zero():
        print(text, file=sys.stderr, flush=True)
