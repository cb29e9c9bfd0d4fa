"""Print the script, manifest or command of a job on a cluster, to read and keep, without TorchX:

python -m launch.render slurm|kubernetes|torchrun <verb> [-j 2x8] [flags] -- experiment=... key=value
python -m launch.render serving serve [flags] -- artifact=... key=value
python -m launch.render chain slurm|argo|airflow|compose CHAIN.yaml [flags]
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from launch.chain import render_chain
from launch.kubernetes import render_job
from launch.kubernetes_options import KubernetesOptions
from launch.kubernetes_serving import ServingOptions, render_serving
from launch.options import main_of, option, parse_job
from launch.resources import this_host
from launch.slurm import SlurmOptions, render_sbatch
from launch.workload import SERVICES, WORKLOADS, Where, Workload, check_one_task, make_workload
from pipeline.cli.command_line import print_user_errors
from pipeline.runtime.errors import LaunchError


@dataclass(frozen=True)
class TorchrunOptions:
    head: str = option("localhost", "name of the first node, as other nodes know it; required for several nodes")


def render_torchrun(workload: Workload, options: TorchrunOptions) -> str:
    """Return the command, which is the same for every node."""
    check_one_task(workload, "torchrun")
    if workload.nodes > 1 and options.head == "localhost":
        raise LaunchError(
            f"-j {workload.shape} connects to the first node: give --head NAME, the name that other nodes know"
        )
    env = workload.whole_env(this_host().cpu)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    if workload.nodes > 1:
        lines.insert(0, f"# Run it on each of the {workload.nodes} nodes.")
    return "\n".join([*lines, workload.shell_line(options.head, workload.name)]) + "\n"


# The options of each target, and the function that renders a workload with them.
TARGETS: dict[str, tuple[type, Callable[[Workload, Any], str]]] = {
    "slurm": (SlurmOptions, render_sbatch),
    "kubernetes": (KubernetesOptions, render_job),
    "serving": (ServingOptions, render_serving),
    "torchrun": (TorchrunOptions, render_torchrun),
}


def rehearse(workload: Workload) -> None:
    """Rehearse the first and last rank on shadow GPUs (simulated). Exit if a rehearsal fails."""
    if workload.verb != "train":
        raise LaunchError(f"--rehearse rehearses a training, but {workload.verb} is not a training: remove it")
    last = workload.nodes * workload.ranks_per_node - 1
    overrides = workload.command[workload.command.index(workload.verb) + 1 :]
    ranks = ",".join(map(str, sorted({0, last})))
    words = ["-m", "pipeline", "rehearse", *overrides, f"world_size={last + 1}", f"ranks=[{ranks}]"]
    done = subprocess.run([sys.executable, *words], stdout=sys.stderr)
    if done.returncode:
        sys.exit(done.returncode)


def render(target: str, argv: list[str]) -> str:
    """Return the text for the command line's words after the target. --help and errors end the process."""
    kind, render_with = TARGETS[target]
    parser = argparse.ArgumentParser(
        prog=f"python -m launch.render {target}", allow_abbrev=False,
        usage="%(prog)s VERB [flags] -- key=value ...", description=(__doc__ or "").splitlines()[0],
    )  # fmt: skip
    verbs = SERVICES if target == "serving" else WORKLOADS
    parser.add_argument("verb", choices=sorted(verbs), metavar="VERB", help=", ".join(verbs))
    parser.add_argument(
        "--rehearse", action="store_true", help="first rehearse the first and last rank of a training on shadow GPUs"
    )
    typed, overrides, (where, options) = parse_job(parser, argv, {"the job": Where, target: kind})
    workload = make_workload(typed.verb, __doc__, overrides, where, typed.check_data)
    with print_user_errors():
        text = render_with(workload, options)
        if typed.rehearse:
            rehearse(workload)
        return text


def main() -> None:
    def text_of(target: str, argv: list[str]) -> str:
        return render_chain(argv) if target == "chain" else render(target, argv)

    main_of(__doc__ or "", "the target", [*TARGETS, "chain"], text_of)


if __name__ == "__main__":
    main()
