"""List the versions of a registry:  python -m pipeline registry list registry/quickstart

    python -m pipeline registry history REGISTRY [html=PAGE]   what was promoted, rejected, skipped, rolled back, and why
    python -m pipeline registry verify REGISTRY [VERSION]      read every byte (exit code 0, or 1 if one is damaged)
    python -m pipeline registry rollback REGISTRY [VERSION] [reason=...]
                                                               go back to the version before; retrain then waits
    python -m pipeline registry unpin REGISTRY                 let retrain promote again
    python -m pipeline registry add REGISTRY run=RUN           start with a model that was trained by hand
    python -m pipeline registry explain REGISTRY OLD NEW source=ROWS
                                                               why two versions score differently (the verb explain)

REGISTRY may also be given as registry=..., VERSION as version=v000012.
"""

from __future__ import annotations

import sys

from pipeline.cli.command_line import Arguments, Command
from pipeline.cli.verb import verb
from pipeline.config.jobs.retrain import RegistryJob
from pipeline.config.registry import from_extra
from pipeline.config.retraining import REGISTRY_COMMANDS
from pipeline.retraining.ledger import ROLLED_BACK, UNPINNED, Ledger, Record, describe_record
from pipeline.retraining.promotion import add_run
from pipeline.retraining.registry import VERSION_NAME, Registry, RegistryError
from pipeline.runtime.errors import DamagedError, UserError
from pipeline.runtime.masking import one_line
from pipeline.runtime.process.stdout import write_out
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.signature import requiring, signing

DAMAGED = 1  # exit code of verify
ROLLBACK_BUDGET_S = 4.0  # seconds for checksums: a rollback then takes 5 s for any size


def list_versions(job: RegistryJob) -> list[str]:
    """Return one line per version, oldest first."""
    registry = Registry(job.registry)
    pointer = registry.pointer()
    lines = [f"{'version':<10}{'made':<22}{'window':<28}{'parent':<10}{'size':>10}  NE on the next window"]
    for name in registry.names():
        version = registry.version(name)
        lineage, metrics = version.lineage, version.lineage.get("metrics", {})
        ne = f"{metrics['challenger_ne']:.4f}" if "challenger_ne" in metrics else "not measured"
        ne += f" ({metrics['label']})" if "label" in metrics else ""
        mark = "  <- champion" if pointer and pointer.version == name else ""
        mark += (
            f", pinned: {one_line(pointer.reason) or 'no reason given'}" if mark and pointer and pointer.pinned else ""
        )
        lines.append(
            f"{name:<10}{lineage['created_at']:<22}{lineage.get('window') or '-':<28}{lineage.get('parent') or '-':<10}"
            f"{version.size_bytes / 2**20:>8.1f} M  {ne}{mark}"
        )
    if len(lines) > 1:
        return lines
    absent = "" if storage.exists(job.registry) else ": there is no such folder"
    return [f"{job.registry} has no version yet{absent}"]


def show_history(job: RegistryJob) -> list[str]:
    """Return the newest `job.num` records, oldest first. Write a page of champions and decisions to
    job.html."""
    if job.html:
        render_registry = from_extra("render_registry", "html=")
        storage.publish_text(job.html, render_registry(Registry(job.registry), Ledger(job.registry)))
    records = [record for record, _ in zip(Ledger(job.registry).newest(), range(job.num), strict=False)]
    return [describe_record(record) for record in reversed(records)] or [f"{job.registry} has no history yet"]


def verify_versions(job: RegistryJob) -> dict[str, str]:
    """Return version -> "" or its problem."""
    registry = Registry(job.registry)
    problems = {}
    for name in [job.version] if job.version else registry.names():
        try:
            problems[name] = registry.verify(registry.version(name))[0]
        except UserError as error:
            if job.version and isinstance(error, RegistryError):
                raise
            problems[name] = str(error)
    return problems


def rollback(job: RegistryJob) -> list[str]:
    """Verify a version, point to it and pin it. Raises RegistryError if it is missing or
    damaged."""
    registry = Registry(job.registry)
    try:
        pointer = registry.pointer()
    except DamagedError:
        if not job.version:
            raise
        pointer = None  # the pointer is written again
    name = job.version or registry.predecessor()
    if name is None:
        raise RegistryError(
            f"{job.registry} has no version to go back to{f' from {pointer.version}' if pointer else ''}; "
            f"there are {', '.join(registry.names()) or 'none'}"
        )
    version = registry.version(name)
    problem, checked = registry.verify(version, ROLLBACK_BUDGET_S)
    if problem:
        raise RegistryError(f"{name} is damaged and was not rolled back to: {problem}; choose another version=")
    was = pointer.version if pointer else ""
    registry.pin(name, job.reason or (f"rolled back from {was}" if was != name else "pinned by hand"))
    Ledger(job.registry).append(
        Record(ROLLED_BACK, version=name, parent=was, reasons=[job.reason] if job.reason else [])
    )
    lines = [
        f"champion    {name}, was {was or 'none'}; checksums of {checked / 2**20:,.1f} of {version.size_bytes / 2**20:,.1f} MiB "
        "hold, and the sizes of all files",
        f"pinned      retrain promotes nothing until `python -m pipeline registry unpin {job.registry}`",
    ]
    if name == was:
        lines[0] = f"champion    {name}, as before; it is now pinned"
    return lines


def unpin(job: RegistryJob) -> list[str]:
    registry = Registry(job.registry)
    pointer = registry.pointer()
    if pointer is not None and not pointer.pinned:
        return [f"champion    {pointer.version} is not pinned"]
    moved = registry.unpin()
    Ledger(job.registry).append(Record(UNPINNED, version=moved.version))
    return [f"champion    {moved.version}, no longer pinned: retrain continues with the next window"]


def add(job: RegistryJob) -> list[str]:
    """Make a run's newest step the champion without a gate. Raises ConfigError if there is a
    champion already."""
    record = add_run(Registry(job.registry), Ledger(job.registry), job.run)
    return [f"champion    {record.version}, from {job.run}"]


def run(job: RegistryJob) -> list[str]:
    """Return what the command prints. A damaged version ends the process with DAMAGED."""
    with signing(job.sign_key), requiring(job.require_signature):
        return _run(job)


def _run(job: RegistryJob) -> list[str]:
    if job.command == "verify":
        problems = verify_versions(job)
        lines = [f"{version}: {problem or 'intact'}" for version, problem in problems.items()]
        if any(problems.values()):
            write_out("\n".join(lines))
            sys.exit(DAMAGED)
        return lines
    commands = {"list": list_versions, "history": show_history, "rollback": rollback, "unpin": unpin, "add": add}
    return commands[job.command](job)


def _explain(words: Arguments) -> None:
    from_extra("explain_versions", "registry explain")(words)


COMMANDS = (
    *(Command(name, ("registry", "version"), {"version": VERSION_NAME.pattern}) for name in REGISTRY_COMMANDS),
    Command("explain", ("registry", "old", "new"), run=_explain),
)
main = verb("registry", RegistryJob, describe="\n".join, commands=COMMANDS, default="list")(run)
