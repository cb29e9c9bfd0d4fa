"""Erase a value everywhere below some folders, search them, and record it in the registry's ledger.

All folders are rewritten next to the present ones first. An error up to then changes nothing. Then each folder is
replaced, data sets last, because the vocabularies of data sets say which row is the value's. So the same command
finishes the work of a killed process.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from pipeline.data.dataset import Dataset, load_dataset, vocabulary_of
from pipeline.extras.erase.artifacts import erase_from_artifact
from pipeline.extras.erase.config import EraseJob
from pipeline.extras.erase.datasets import erase_from_dataset
from pipeline.extras.erase.folders import EraseError, Places, Rewritten, find_places, recover, rewriting
from pipeline.extras.erase.plain_files import erase_from_file
from pipeline.extras.erase.scan import found_in
from pipeline.extras.erase.sequences import sequence_files
from pipeline.extras.erase.steps import erase_from_steps
from pipeline.extras.erase.target import MIN_BYTES, Target
from pipeline.retraining.ledger import Ledger, Record
from pipeline.retraining.registry import FORMAT_VERSION
from pipeline.runtime.byte_counts import show_size
from pipeline.runtime.logs import get_logger
from pipeline.runtime.storage import storage
from pipeline.runtime.storage.checksums import checksums_of
from pipeline.runtime.storage.lease import RunFolderHeldError, take_lease
from pipeline.runtime.storage.manifest import MANIFEST, check_still_signed, open_manifest, seal_manifest
from pipeline.runtime.storage.signature import Purpose, requiring, signing
from pipeline.serving.artifact.manifest import ITEM_VALUES, read_manifest

ERASED = "erased"  # the state of the ledger's record
LEASE_TTL_S = 120.0
OF_REGISTRY = ("ledger", "champion.json", "pin.json")  # never changed here
logger = get_logger("pipeline.erase")


@dataclass
class Erasure:
    """`rewritten` lists the folders and files that changed. `left`: file -> what it still contains. `without_feature`: data
    sets that do not say which of their rows are the value's."""

    rewritten: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)
    without_feature: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_rows: int = 0
    num_files: int = 0
    num_bytes: int = 0
    record: int = 0
    digest: str = ""
    receipt: str = ""


def erase(job: EraseJob) -> Erasure:
    """Erase the value. Raises EraseError, before anything changes, if its row is shared or unknown."""
    with signing(job.sign_key), requiring(job.require_signature), ExitStack() as stack:
        _take_leases(job, find_places(filter(os.path.lexists, job.places)), stack)
        for root in job.places:
            recover(root)
        places = find_places(job.places)
        target, result = Target(job.feature, job.value), Erasure(removed=places.leftovers)
        for folder in _staged(target, places, result, stack):
            if folder.commit():
                result.rewritten.append(folder.path)
                logger.info("rewritten  %s", folder.path)
        for path in places.leftovers:
            shutil.rmtree(path)
        for path in places.files:
            if not _is_of_registry(job, path) and erase_from_file(target, path):
                result.rewritten.append(path)
        result.num_rows = len(target.rows)
        _scan(target, job, places, result)
        if not result.left:
            _record(job, result)
        return result


def _take_leases(job: EraseJob, places: Places, stack: ExitStack) -> None:
    """Take the leases of the registry and of all runs, so that nothing is trained or promoted meanwhile."""
    for folder in sorted({*([job.registry] if job.registry else []), *map(os.path.dirname, places.checkpoints)}):
        try:
            stack.callback(take_lease(folder, LEASE_TTL_S).release)
        except RunFolderHeldError as error:
            raise EraseError(
                f"nothing is erased, because {folder} is in use: {error}; stop it, and start it again later"
            ) from None


def _staged(target: Target, places: Places, result: Erasure, stack: ExitStack) -> list[Rewritten]:
    """Rewrite all folders next to the present ones. Return them in the order in which they are to be replaced."""
    known: dict[str, Dataset] = {}
    sources = [*places.datasets, *(os.path.join(path, "data") for path in places.versions)]
    data = {load_dataset(path).fingerprint(): path for path in reversed(sources)}
    for path in sources:
        dataset = load_dataset(path)
        sharing = {each.name for each in dataset.sparse_features if vocabulary_of(each) == target.feature}
        target.sharing |= sharing - {target.feature}
        target.sequence_files |= sequence_files(dataset)
        if not sharing and dataset.group_column != target.feature:
            result.without_feature.append(path)
    for path in places.artifacts:
        shares = {each.name: each.sequence and each.sequence.shares for each in read_manifest(path).schema.features}
        target.sharing |= {name for name, owner in shares.items() if owner == target.feature}
    datasets = [stack.enter_context(rewriting(path)) for path in places.datasets]
    for folder in datasets:
        erase_from_dataset(target, folder, known)
    others = []
    for path in places.versions:
        others.append(folder := stack.enter_context(rewriting(path)))
        erase_from_dataset(target, folder, known, "data")
        result.num_steps += len(erase_from_steps(target, folder, data, known, "checkpoint"))
        if os.path.isdir(os.path.join(path, "artifact")):
            erase_from_artifact(target, folder, "artifact")
        _seal_version(folder, known)
    for path in places.checkpoints:
        others.append(folder := stack.enter_context(rewriting(path)))
        result.num_steps += len(erase_from_steps(target, folder, data, known))
    for path in places.artifacts:
        others.append(folder := stack.enter_context(rewriting(path)))
        erase_from_artifact(target, folder)
    return [*others, *datasets]


def _seal_version(folder: Rewritten, known: dict[str, Dataset]) -> None:
    """Write the manifest of a version with the checksums of its rewritten files."""
    path = os.path.join(folder.path, MANIFEST)
    manifest: dict[str, Any] = open_manifest(path, Purpose.VERSION, FORMAT_VERSION)
    changed = [name for name in manifest["files"] if folder.changed(name)]
    if not changed:
        return
    check_still_signed(path)
    for name in changed:
        manifest["files"][name] = checksums_of(os.path.join(folder.staged, name))
    about = manifest["lineage"].get("data") or {}
    if about.get("fingerprint") in known:
        about["fingerprint"] = known[about["fingerprint"]].fingerprint()
    storage.publish_text(os.path.join(folder.staged, MANIFEST), seal_manifest(manifest, Purpose.VERSION))


def _is_of_registry(job: EraseJob, path: str) -> bool:
    return bool(job.registry) and os.path.relpath(path, job.registry).split(os.sep)[0] in OF_REGISTRY


def _values_of_others(target: Target, places: Places) -> set[str]:
    """Return the files that list the values of other features only, and add these features to the target."""
    others: dict[str, set[str]] = {}
    for folder in [*places.datasets, *(os.path.join(path, "data") for path in places.versions)]:
        for each in load_dataset(folder).sparse_features:
            files = others.setdefault(vocabulary_of(each), set())
            if each.vocabulary:
                files.add(os.path.join(folder, each.vocabulary))
    for folder in [*places.artifacts, *(os.path.join(path, "artifact") for path in places.versions)]:
        if not os.path.exists(os.path.join(folder, MANIFEST)):
            continue
        manifest = read_manifest(folder)
        for feature in manifest.schema.features:
            files = others.setdefault((feature.sequence and feature.sequence.shares) or feature.name, set())
            if feature.name in manifest.vocabularies:
                files.add(os.path.join(folder, manifest.vocabularies[feature.name]))
        for key in manifest.feature_tables:  # ids that the model may not read
            others.setdefault(key, set())
        if manifest.retrieval is not None:
            others.setdefault(manifest.retrieval.item_feature, set()).add(os.path.join(folder, ITEM_VALUES))
    own = others.pop(target.feature, set())
    target.others = set(others)
    return set().union(*others.values()) - own


def _scan(target: Target, job: EraseJob, places: Places, result: Erasure) -> None:
    """Search every file below the folders, except the lists of values of other features."""
    of_others = _values_of_others(target, places)
    for root in job.places:
        found = [(root, "", [os.path.basename(root)])] if os.path.isfile(root) else list(os.walk(root))
        for folder, _, names in found:
            at = os.path.dirname(folder) if os.path.isfile(folder) else folder
            with_ids = any(at == path or at.startswith(path + os.sep) for path in [*places.datasets, *places.versions])
            for name in names:
                path = os.path.join(at, name)
                result.num_files += 1
                result.num_bytes += os.path.getsize(path)
                if path not in of_others and (problem := found_in(target, path, with_ids)):
                    result.left[path] = problem


def _record(job: EraseJob, result: Erasure) -> None:
    """Append to the ledger. Without the receipt, the value cannot be found from the digest by trying values."""
    result.receipt = secrets.token_hex(16)
    result.digest = hashlib.sha256(f"{result.receipt}:{job.feature}:{job.value}".encode()).hexdigest()
    if job.registry:
        about = {
            "feature": job.feature, "digest": result.digest, "rewritten": len(result.rewritten),
            "steps": result.num_steps, "searched_files": result.num_files, "searched_bytes": result.num_bytes,
        }  # fmt: skip
        reason = f"a value of {job.feature} was erased from {len(result.rewritten)} folders and files; digest {result.digest[:16]}"
        result.record = Ledger(job.registry).append(Record(ERASED, reasons=[reason], data=about)).number


def describe(job: EraseJob, result: Erasure) -> list[str]:
    """Return the lines that the command prints."""
    lines = [
        f"erased      {job.feature}: {len(result.rewritten):,} folders and files rewritten, {result.num_steps:,} steps among them"
    ]
    if not result.rewritten:
        lines = [f"erased      nothing: no vocabulary and no file has this value of {job.feature} (check its spelling)"]
    lines += [
        f"not erased  {path}: the data set has no feature {job.feature!r}, so it does not say which rows have the value: "
        "prepare it again from raw rows without them"
        for path in result.without_feature
    ]
    lines += [f"removed     {path}, left by a writer that did not finish" for path in result.removed]
    searched = f"{result.num_files:,} files ({show_size(result.num_bytes)})"
    if result.left:
        lines += [f"left        {path}: {problem}" for path, problem in sorted(result.left.items())]
        return [*lines, f"scan        {len(result.left):,} of {searched} still hold the value: remove or rewrite them, and "
                "run the same command again; nothing was recorded"]  # fmt: skip
    lines.append(
        f"scan        none of {searched} has the value, or one of {result.num_rows:,} rows and states that it had"
    )
    if len(job.value.encode()) < MIN_BYTES:
        lines.append(
            f"            a value of fewer than {MIN_BYTES} bytes occurs in numbers by chance: it was searched in text and cells"
        )
    if result.record:
        lines.append(f"ledger      record {result.record}, digest {result.digest[:16]}")
    return [
        *lines,
        f"receipt     {result.receipt}: keep it; SHA-256 of <receipt>:{job.feature}:<value> is the digest {result.digest}",
    ]
