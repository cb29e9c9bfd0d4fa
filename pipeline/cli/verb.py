"""Define a verb: its job, its function, and its behaviour as a process.

A verb is one file that calls `verb`; pipeline/cli/verbs.py finds the file:

    @dataclass
    class CountJob:
        source: str = "???"

    def count(job: CountJob) -> int: ...

    main = verb("count", CountJob, describe=lambda rows: f"{rows} rows")(count)

Values come from conf/<name>.yaml if there is such a file, otherwise from the job's defaults.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, TypeVar

from pipeline.cli.command_line import (
    Command,
    check_encoding,
    parse_command_line,
    print_line,
    print_user_errors,
    read_arguments,
)
from pipeline.config.jobs.job import CONFIG_NAMES
from pipeline.config.registry import register
from pipeline.config.training import LoggerConfig, TrainerConfig
from pipeline.devices.cpu.process import (
    computes_here,
    find_kernel_cache,
    find_other_caches,
    limit_openmp_spin,
    use_huge_pages,
)
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

    describe: returns what rank 0 prints about the result. validate: checks the job before anything
    heavy is imported. commands, default: the words that may be before key=value (see Command).
    written_to: the folder or file that errors of the file system are about. runs_on_ranks: the verb
    may run on many ranks and for long, so it has a watchdog and ends with the agent that started
    it. when_interrupted: returns what exists after Ctrl-C. handles_sigterm: after SIGTERM it saves
    its state and ends. runs_kernels: our CPU kernels run next to OpenMP's threads, which must then
    sleep early, on tensors for which huge pages are fast.
    """

    job: type[Job]
    run: Callable[[Job], Result]
    doc: str
    describe: Callable[[Result], str] | None = None
    validate: Callable[[Job], object] | None = None
    when_interrupted: Callable[[Job], str] = lambda job: "the same command starts from the beginning"
    commands: tuple[Command, ...] = ()
    default: str = ""
    written_to: Callable[[Job], str] = _output_of
    runs_on_ranks: bool = False
    handles_sigterm: bool = False
    runs_kernels: bool = False

    def main(self) -> None:
        """Compose the job of sys.argv, run it, and print the result on rank 0. Every error ends the
        process."""
        self.prepare_process()
        try:
            with print_user_errors():
                check_encoding(sys.argv)
                arguments = read_arguments(sys.argv[1:], self.commands, self.default)
                command = next((each for each in self.commands if each.name == arguments.command), None)
                if command is not None and command.run is not None and "--help" not in arguments.flags:
                    command.run(arguments)
                    return
            takes_command = any(field.name == "command" for field in fields(self.job))  # type: ignore[arg-type]
            overrides = arguments.overrides() if takes_command else arguments.remaining()
            job = parse_command_line(self.job, self.doc, overrides, self.validate)
        except KeyboardInterrupt:
            print_line("\ninterrupted")
            sys.exit(INTERRUPTED)
        self.run_as_process(job)

    def run_as_process(self, job: Job) -> None:
        """Run the job and print the result on rank 0. Every error ends the process."""
        rank = int(os.environ.get("RANK", "0"))
        logs = getattr(job, "logger", None)
        configure_logging(rank, logs.format if isinstance(logs, LoggerConfig) else "text")
        if self.runs_on_ranks:
            trainer = getattr(job, "trainer", None)
            watchdog.start(rank, trainer.limits() if isinstance(trainer, TrainerConfig) else None)
        try:
            self._run(job)
        except KeyboardInterrupt:
            print_line(f"\ninterrupted; {self.when_interrupted(job)}")
            sys.exit(INTERRUPTED)
        except preemption.Preempted:
            print_line("ended by SIGTERM, nothing had to be saved; run the same command again")
            raise
        except Exception as error:
            # Not left to the interpreter or torchelastic's @record, because they do not hide
            # credentials.
            write_error_file(f"{type(error).__name__}: {error}", error)
            print(masked_traceback(error), file=sys.stderr, end="", flush=True)
            sys.exit(FAILED)
        finally:
            watchdog.end()

    def prepare_process(self) -> None:
        """Set what must be set before torch is imported, and listen to signals."""
        if self.runs_kernels:
            find_kernel_cache()
            find_other_caches()
            if not self.runs_on_ranks or computes_here(sys.argv[1:]):
                limit_openmp_spin()
                use_huge_pages()
        if self.handles_sigterm:
            preemption.listen()
        # A rank must not outlive its agent, unless the agent is already stopping it.
        if self.runs_on_ranks and "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()
            preemption.when_requested(lambda: die_with_parent(False))

    def _run(self, job: Job) -> None:
        with print_user_errors(self.written_to(job)):
            result = self.run(job)
            if self.describe is not None and os.environ.get("RANK", "0") == "0":
                write_out(self.describe(result))


def resume_hint(job: object) -> str:
    """Return `when_interrupted` of a verb that resumes the work of an earlier call."""
    return "run the same command again to resume"


def verb(name: str, job: type[Job], **options: Any) -> Callable[[Callable[[Job], Result]], Main]:
    """Register a function as the verb `name` and return the main() of its file. `options` are the
    fields of Verb. The help text is the docstring of the calling module, or `doc`."""
    CONFIG_NAMES.setdefault(job, name)

    def define(run: Callable[[Job], Result]) -> Main:
        module = sys._getframe(1).f_globals
        doc = options.pop("doc", module.get("__doc__") or run.__doc__ or "")
        main = partial(Verb.main, defined := Verb(job, run, doc, **options))
        main.__module__, main.__qualname__, main.verb = module["__name__"], name, defined  # type: ignore[attr-defined]
        return register("verb", name)(main)

    return define
