"""Show the canary of a registry:  python -m pipeline canary status registry/quickstart

    python -m pipeline canary start REGISTRY VERSION share=0.05            VERSION answers 5 % of the keys
    python -m pipeline canary start REGISTRY run=RUN artifact=ARTIFACT     make the version of a run first
    python -m pipeline canary evaluate REGISTRY log=LOG labels=LABELS      judge it by live labels, and promote or stop it
    python -m pipeline canary promote REGISTRY                             promote it by hand
    python -m pipeline canary stop REGISTRY [reason=...]                   stop it by hand

Servers with router.canary.artifact=REGISTRY follow these commands. REGISTRY may also be given as registry=...,
VERSION as version=v000012.
"""

from __future__ import annotations

from pipeline.cli.command_line import Command
from pipeline.cli.verb import verb
from pipeline.extras.canary import commands
from pipeline.extras.canary.config import CANARY_COMMANDS, CanaryJob
from pipeline.retraining.registry import VERSION_NAME
from pipeline.runtime.storage.signature import requiring, signing


def canary(job: CanaryJob) -> list[str]:
    """Return what the command prints. Raises RegistryError or DataError."""
    with signing(job.sign_key), requiring(job.require_signature):
        if job.command == "evaluate":
            from pipeline.extras.canary.evaluate import evaluate

            return evaluate(job)
        found = {
            "status": commands.status,
            "start": commands.start,
            "promote": commands.promote_by_hand,
            "stop": commands.stop_by_hand,
        }
        return found[job.command](job)


COMMANDS = tuple(Command(name, ("registry", "version"), {"version": VERSION_NAME.pattern}) for name in CANARY_COMMANDS)
main = verb("canary", CanaryJob, describe="\n".join, commands=COMMANDS, default="status")(canary)
