"""Run a command as the process of a container, by an OCI runtime, on this machine's own files."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

SEEN = (
    "bin",
    "etc",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "opt",
    "root",
    "sbin",
    "usr",
    "var",
)  # of the host's root, read-only


def as_container(
    runtime: str, command: list[str], environ: dict[str, str], folder: Path, *writable: Path, memory_bytes: int = 0
) -> list[str]:
    """The command that runs `command` in a container of its own. `folder` takes the runtime's files and is in the container,
    as are this folder, read-only, and the `writable` ones. Nothing is mounted but in the container's own namespace.
    """
    bundle = folder / "bundle"
    (bundle / "rootfs").mkdir(parents=True)
    subprocess.run([runtime, "spec", "--bundle", str(bundle)], check=True)
    path = bundle / "config.json"
    spec = json.loads(path.read_text())
    spec["process"] |= {
        "terminal": False,
        "args": command,
        "cwd": str(Path.cwd()),
        "env": [f"{key}={value}" for key, value in environ.items()],
    }
    spec["process"].pop("rlimits", None)
    spec["root"] = {"path": "rootfs", "readonly": False}
    spec["hostname"] = "localhost"  # a name that resolves, as a kubelet sees to for a pod
    # The host's view of cgroups: of which version it is depends on the host.
    spec["mounts"] = [each for each in spec["mounts"] if each["destination"] != "/sys/fs/cgroup"]
    spec["mounts"] += [_bind(f"/{name}", "ro") for name in SEEN if os.path.isdir(f"/{name}")]
    spec["mounts"] += [{"destination": "/tmp", "type": "tmpfs", "source": "tmpfs"}, _bind(str(Path.cwd()), "ro")]
    spec["mounts"].append(_bind("/sys/fs/cgroup", "ro"))
    if memory_bytes:
        spec["linux"].setdefault("resources", {})["memory"] = {"limit": memory_bytes}
    spec["mounts"] += [_bind(str(each), "rw") for each in (folder, *writable)]
    path.write_text(json.dumps(spec))
    name = f"{folder.parent.name}-{folder.name}"
    return [runtime, "--root", str(folder / "runtime"), "run", "--bundle", str(bundle), name]


def _bind(path: str, mode: str) -> dict[str, Any]:
    return {"destination": path, "type": "bind", "source": path, "options": ["rbind", mode]}
