"""A training on a real Slurm of two nodes that loses a node, goes on with the other, and has the first back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.launch.launching import SAVED, START_S, STEP, Launch
from tests.launch.slurm_cluster import wait_until
from tests.support.stored_tensors import stored_tensors

pytestmark = pytest.mark.campaign
EVERY = 100
RESUMED = re.compile(r"resumed from step (\d+), trained on (\d) rank")


def _steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_????????"))


def _words(launch: Launch, run: Path) -> list[str]:
    shared = [word for word in launch.overrides if not word.startswith("run_dir=")]
    saving = [f"checkpoint.save_every_steps={EVERY}", "checkpoint.keep_last_n=1000", "trainer.max_steps=100000"]
    return [*shared, f"run_dir={run}", *saving]


def _until_saved(launch: Launch, run: Path, after: int, count: int = 1) -> int:
    """The step of the newest of so many saves at multiples of EVERY after the step."""

    def found() -> list[int]:
        return [step for step in _steps(run) if step > after and step % EVERY == 0]

    wait_until(lambda: len(found()) >= count, f"saves after step {after} of {run}", START_S)
    return found()[count - 1]


def _same_from(launch: Launch, run: Path, step: int, until: int, j: str) -> None:
    """A job of a fixed number of nodes that goes on from `step` has the same bits at `until`."""
    copy = run.with_name(f"from_{step}_{j}")
    shutil.copytree(run, copy, symlinks=True)
    shutil.rmtree(copy / ".meetings")
    for later in (each for each in _steps(copy) if each > step):
        shutil.rmtree(copy / "checkpoints" / f"step_{later:08d}")
    job_id = launch.sbatch(launch.render("train", "-j", j, "--cpu", "4", "--", *_words(launch, copy)))
    wait_until(lambda: until in _steps(copy), f"step {until} from {step} on {j}", START_S)
    launch.cluster.ask("scancel", job_id)
    launch.cluster.wait_for_state(job_id, "CANCELLED")
    name = f"checkpoints/step_{until:08d}"
    elastic, fixed = stored_tensors(str(run / name)), stored_tensors(str(copy / name))
    assert elastic and elastic == fixed
    print(f"{j} from step {step} to {until}: {sum(map(len, elastic.values())):,} bytes equal")


def test_a_lost_node_is_done_without_and_taken_up_again_with_the_same_bits(launch: Launch) -> None:
    run = launch.folder / "run"
    job_id = launch.sbatch(launch.render("train", "-j", "1:2x1", "--cpu", "4", "--", *_words(launch, run)))
    wait_until(lambda: _has_saved_with_two(launch, job_id), "a save of two nodes", START_S)
    stays, lost = sorted(("0", "1"), key=lambda task: launch.cluster.job(f"{job_id}_{task}")["NodeList"])
    assert launch.cluster.job(f"{job_id}_{lost}")["NodeList"] == "node2"
    launch.cluster.hosts["node2"].cut_power()
    launch.wait_for(f"{job_id}_{stays}", r"1 node\(s\) have joined; before: 2")
    launch.wait_for(f"{job_id}_{stays}", RESUMED.pattern.replace(r"(\d) rank", "2 rank"))
    from_two = int(RESUMED.findall(launch.output(f"{job_id}_{stays}"))[-1][0])
    assert re.search(rf"step {from_two}  loaded from \S+ in \d+\.\d s", launch.output(f"{job_id}_{stays}"))
    alone = _until_saved(launch, run, from_two, 2)
    launch.cluster.start_node("node2")
    launch.wait_for(f"{job_id}_{stays}", "a node has joined")
    wait_until(lambda: [step for step, ranks in _resumed(launch, job_id) if ranks == 1], "both going on", START_S)
    (from_one,) = (step for step, ranks in _resumed(launch, job_id) if ranks == 1)
    assert from_one >= alone and from_one in _steps(run)  # saved for the node that came, at no loss
    together = _until_saved(launch, run, from_one, 2)
    launch.cluster.ask("scancel", job_id)
    for task in (stays, lost):
        launch.cluster.wait_for_state(f"{job_id}_{task}", "CANCELLED")
    print(f"two nodes to {from_two}, one to {from_one}, two to {_steps(run)[-1]}")
    assert launch.cluster.job(f"{job_id}_{stays}")["Restarts"] == "0"
    assert launch.cluster.job(f"{job_id}_{lost}")["Restarts"] == "1"
    trained = launch.trained_steps()
    assert trained == sorted(set(trained)) and STEP.search(launch.output(f"{job_id}_{stays}"))
    _same_from(launch, run, from_two, alone, "1x1")
    _same_from(launch, run, from_one, together, "2x1")


def _outputs(launch: Launch, job_id: str) -> str:
    return launch.output(f"{job_id}_0") + launch.output(f"{job_id}_1")


def _resumed(launch: Launch, job_id: str) -> list[tuple[int, int]]:
    return [(int(step), int(ranks)) for step, ranks in RESUMED.findall(_outputs(launch, job_id))]


def _has_saved_with_two(launch: Launch, job_id: str) -> bool:
    before, met, after = _outputs(launch, job_id).partition("2 node(s) have met")
    return bool(met and SAVED.search(after + before))
