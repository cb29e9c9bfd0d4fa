"""Measure how much longer saves and loads take if a key signs and a signature is required:

    python -m benchmarks.signatures [--gib 1] [--rounds 5] [--folder DIR] [--output signatures.json]

One rank holds tables of `--gib` GiB. Each round saves and loads without and with signatures, in an
order that alternates, so that both have the same machine; a ratio is that of the medians. "from
disk" is after the system has forgotten the files. Loads with a required signature verify BLAKE3
digests instead of CRC-32s; saves compute both.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from benchmarks.checkpoint import Tables, timed
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.extras.ssd_serving.lookup import forget_pages
from pipeline.runtime.process.distributed import DistributedContext
from pipeline.runtime.storage.block_sums import ALGORITHMS, digest_of
from pipeline.runtime.storage.signature import requiring, signing

PLAIN, SIGNED = "plain", "signed"


def make_keys(folder: Path) -> tuple[str, str]:
    key = Ed25519PrivateKey.generate()
    private, public = folder / "sign.pem", folder / "sign.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return str(private), str(public)


def one_way(folder: Path, model: Tables, context: DistributedContext, keys: tuple[str, str] | None) -> dict[str, float]:
    """Return the seconds of a save, of a load and of a load from disk."""
    with ExitStack() as stack:
        if keys is not None:
            stack.enter_context(signing(keys[0]))
            stack.enter_context(requiring(keys[1]))
        checkpointer = Checkpointer(str(folder), model, None, context)
        seconds = {"save": timed(lambda: checkpointer.save(1))}
        seconds["load"] = timed(checkpointer.restore_latest)
        for file in (folder / "step_00000001").glob("*.distcp"):
            forget_pages(str(file))
        seconds["load, from disk"] = timed(checkpointer.restore_latest)
    shutil.rmtree(folder)
    return seconds


def gib_per_cpu_s() -> dict[str, float]:
    """Return how many GiB each algorithm digests in a second of one core."""
    block, found = torch.randint(0, 256, (8 << 20,), dtype=torch.uint8).numpy().tobytes(), dict[str, float]()
    for algorithm in ALGORITHMS:
        digest_of(algorithm, block)
        began = time.process_time()
        for _ in range(32):
            digest_of(algorithm, block)
        found[algorithm] = 32 * len(block) / 2**30 / (time.process_time() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None)
    parser.add_argument("--output", default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    taken: dict[str, dict[str, list[float]]] = {PLAIN: {}, SIGNED: {}}
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder, keys = Path(name), make_keys(Path(name))
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        context = DistributedContext(0, 1, 0, 1, torch.device("cpu"), "gloo")
        model = Tables(0, 1, int(given.gib * 2**30))
        for number in range(given.rounds + 1):
            for kind in (PLAIN, SIGNED) if number % 2 else (SIGNED, PLAIN):
                seconds = one_way(folder / kind, model, context, keys if kind == SIGNED else None)
                for what, value in seconds.items() if number else []:  # the first round warms up
                    taken[kind].setdefault(what, []).append(value)
        dist.destroy_process_group()
    report = {
        what: {
            **{kind: round(statistics.median(taken[kind][what]), 3) for kind in taken},
            "ratio": round(statistics.median(taken[SIGNED][what]) / statistics.median(taken[PLAIN][what]), 3),
        }
        for what in taken[PLAIN]
    }
    for what, row in report.items():
        print(f"{what:<16} {row[PLAIN]:>7.3f} s plain, {row[SIGNED]:>7.3f} s signed: {row['ratio']:.3f} times")
    for algorithm, speed in gib_per_cpu_s().items():
        print(f"{algorithm:<16} {speed:>7.2f} GiB/s of one core")
    if given.output:
        Path(given.output).write_text(json.dumps({"gib": given.gib, "rounds": given.rounds, **report}, indent=1))


if __name__ == "__main__":
    main()
