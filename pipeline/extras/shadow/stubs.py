"""Build and load two small libraries with which torch's CUDA build runs backward without a driver.

They are C, compiled once by the system's `cc`, or by `ziglang` from PyPI, into a private folder.
Load them before torch, because the loader uses the first definition.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pipeline.runtime.errors import ConfigError
from pipeline.runtime.storage.private import private_folder

# Autograd asks the driver whether a device has a context before it runs a backward pass.
CUDA = """
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{ if (flags) *flags = 0; if (active) *active = 0; return 0; }
"""

# Autograd refuses a device beyond c10::cuda::device_count(), for which the runtime would return 0.
# The count stays 0 until torch has installed its guard for CUDA devices (see device.py).
SHIM = """
static signed char count = 0;
void shadow_set_device_count(int n) { count = (signed char)n; }
signed char _ZN3c104cuda12device_countEv(void) { return count; }
signed char _ZN3c104cuda26device_count_ensure_non_zeroEv(void) { return count; }
"""

LIBRARIES = {"libshadow_shim.so": SHIM, "libcuda.so.1": CUDA}


def load_libraries() -> ctypes.CDLL:
    """Load both libraries so that libraries loaded later use them. Return the shim. Raises ConfigError."""
    if "torch" in sys.modules:
        raise ConfigError("the shadow GPU was activated after torch: call shadow.activate() first")
    folder = build()
    loaded = [ctypes.CDLL(f"{folder}/{name}", mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES]
    return loaded[0]


def build() -> Path:
    """Return the folder of the compiled libraries. The first caller compiles them."""
    sources = repr(sorted(LIBRARIES.items())).encode()
    folder = _own_folder() / hashlib.sha256(sources).hexdigest()[:16]
    if folder.is_dir():
        return folder
    staged = Path(tempfile.mkdtemp(dir=folder.parent))
    for name, source in LIBRARIES.items():
        (staged / "source.c").write_text(source)
        words = [*_compiler(), "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}"]
        subprocess.run([*words, "-o", str(staged / name), str(staged / "source.c")], check=True)
    try:
        staged.rename(folder)  # completely or not at all: another process may have been faster
    except OSError:
        shutil.rmtree(staged)
    return folder


def _own_folder() -> Path:
    """Return a cache folder that belongs only to this user, because its files are executed."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if not os.access(caches if caches.exists() else caches.parent, os.W_OK):
        caches = Path(tempfile.gettempdir())
    return Path(private_folder(str(caches / f"torchrec_pipeline_shadow_{os.getuid()}")))


def _compiler() -> list[str]:
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "cc"]
    raise ConfigError("the shadow GPU needs a C compiler, but there is no cc; `pip install ziglang` installs one")
