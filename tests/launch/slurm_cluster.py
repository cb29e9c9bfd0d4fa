"""A real Slurm on this machine: munged, slurmctld and a slurmd a node, each node with its own name, network and processes.

Every node is a set of namespaces (mount, net, uts, pid) under one `unshare`: killing that ends all its processes at once,
as a power cut does. The nodes see this machine's files, as hosts that share a file system do. Needs root and Debian's
slurm-wlm and munge; `why_not()` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

NETWORK = "10.77.0"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "unshare", "nsenter", "setpriv", "ip")

CONF = """
ClusterName=test
SlurmctldHost=ctl({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={base}/munge.sock,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
ReturnToService=2
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool-%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
SlurmdTimeout=10
MessageTimeout=5
KillWait={kill_wait_s}
JobAcctGatherType=jobacct_gather/none
{accounting}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=urgent Nodes=ALL MaxTime=INFINITE PriorityTier=2 PreemptMode=OFF State=UP
"""

ACCOUNTING = """AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctl
AccountingStoragePort=17099
AccountingStoragePass={base}/munge.sock
MinJobAge=2"""

SLURMDBD_CONF = """AuthType=auth/munge
AuthInfo=socket={base}/munge.sock
DbdHost=ctl
DbdPort=17099
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct
PidFile={base}/slurmdbd.pid
LogFile={base}/slurmdbd.log
"""


PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": PATH}


def why_not(accounting: bool = False) -> str:
    """Why there can be no cluster here; empty where there can."""
    needed = [*PROGRAMS, *(["slurmdbd", "mariadbd", "mariadb-install-db"] if accounting else [])]
    if missing := [name for name in needed if shutil.which(name, path=PATH) is None]:
        return f"Slurm is not installed: no {', '.join(missing)} (Debian: apt-get install slurm-wlm munge iproute2)"
    if os.geteuid() != 0:
        return "a Slurm cluster of namespaces needs root"
    tried = subprocess.run(
        ["unshare", "-m", "-n", "-u", "-p", "--fork", "--mount-proc", "ip", "link", "add", "br0", "type", "bridge"],
        capture_output=True, text=True, env=_environment(),
    )  # fmt: skip
    return f"namespaces are refused here: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """A set of namespaces and the process that holds them; its children end with it."""

    def __init__(self, name: str, base: Path) -> None:
        self.name, self._base = name, base
        setup = (
            f"mount --make-rprivate / && mount --bind {base}/hosts /etc/hosts && hostname {name} && ip link set lo up && "
            # Children of daemons are left to this process, which has to bury them.
            f"touch {base}/up-{name} && trap : TERM && while :; do sleep 1000 & wait; done"
        )
        (base / f"up-{name}").unlink(missing_ok=True)
        # Nothing outlives the tests, however they end: the kernel kills the holder with them, and its child with it.
        hold = ["setpriv", "--pdeathsig", "KILL", "unshare", "-m", "-n", "-u", "-p", "--fork", "--kill-child", "--mount-proc"]  # fmt: skip
        with open(base / f"{name}.err", "w") as errors:
            self._holder = subprocess.Popen(
                [*hold, "bash", "-c", setup], stderr=errors, start_new_session=True, env=_environment()
            )
        wait_until(lambda: (base / f"up-{name}").exists(), f"the namespaces of {name}", 60)
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def command(self, *words: str) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-m", "-n", "-u", "-p", *words]

    def run(self, *words: str) -> None:
        done = subprocess.run(self.command(*words), capture_output=True, text=True, timeout=120, env=_environment())
        if done.returncode:
            raise RuntimeError(f"{self.name}: {' '.join(words)}: {done.stdout}{done.stderr}")

    def cut_power(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._holder.wait(10)


class Cluster:
    """`run()` runs a command beside the controller, as on a login node."""

    def __init__(
        self, num_nodes: int = 2, cpus: int = 4, mem_mb: int = 8000, kill_wait_s: int = 20, accounting: bool = False
    ) -> None:
        """accounting: slurmdbd over MariaDB, and a slurmctld that forgets jobs two seconds after they end."""
        self._accounting = accounting
        self.base = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.base.chmod(0o755)
        self.names = [f"node{index + 1}" for index in range(num_nodes)]
        self.hosts: dict[str, Host] = {}
        self._write_files(cpus, mem_mb, kill_wait_s)

    def _write_files(self, cpus: int, mem_mb: int, kill_wait_s: int) -> None:
        addresses = {name: f"{NETWORK}.{10 + index}" for index, name in enumerate(self.names)}
        names = {"localhost": "127.0.0.1", "ctl": f"{NETWORK}.1", **addresses}
        (self.base / "hosts").write_text("".join(f"{address} {name}\n" for name, address in names.items()))
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={address} CPUs={cpus} RealMemory={mem_mb} State=UNKNOWN"
            for name, address in addresses.items()
        )
        accounts = ACCOUNTING if self._accounting else "AccountingStorageType=accounting_storage/none"
        conf = CONF.format(
            network=NETWORK,
            base=self.base,
            nodes=nodes,
            kill_wait_s=kill_wait_s,
            accounting=accounts.format(base=self.base),
        )
        (self.base / "slurm.conf").write_text(conf)
        (self.base / "munge.key").write_bytes(os.urandom(1024))
        (self.base / "munge.key").chmod(0o600)
        (self.base / "state").mkdir()

    def start(self) -> None:
        ctl = self.hosts["ctl"] = Host("ctl", self.base)
        base = self.base
        ctl.run("ip", "link", "add", "br0", "type", "bridge")
        ctl.run("ip", "addr", "add", f"{NETWORK}.1/24", "dev", "br0")
        ctl.run("ip", "link", "set", "br0", "up")
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}  # fmt: skip
        # One munged serves every node: it is reached by its socket's path.
        ctl.run("munged", "--force", *(f"--{flag}={base}/{file}" for flag, file in files.items()))
        if self._accounting:
            self._start_accounting(ctl)
        ctl.run("env", f"SLURM_CONF={base}/slurm.conf", "slurmctld", "-c")
        for name in self.names:
            self.start_node(name)
        wait_until(lambda: self.num_idle() == len(self.names), "all nodes idle", 120)

    def _start_accounting(self, ctl: Host) -> None:
        base = self.base
        (base / "slurmdbd.conf").write_text(SLURMDBD_CONF.format(base=base))
        (base / "slurmdbd.conf").chmod(0o600)
        ctl.run("mariadb-install-db", "--no-defaults", f"--datadir={base}/db", "--user=root", "--auth-root-authentication-method=normal", "--skip-test-db")  # fmt: skip
        # The client's library knows the socket by this place alone.
        ctl.run("bash", "-c", "mkdir -p /run/mysqld && mount -t tmpfs none /run/mysqld")
        socket = "/run/mysqld/mysqld.sock"
        flags = [f"--datadir={base}/db", f"--socket={socket}", "--skip-networking", "--user=root", "--innodb-buffer-pool-size=64M"]  # fmt: skip
        ctl.run("bash", "-c", 'setsid mariadbd --no-defaults "$@" >/dev/null 2>&1 </dev/null &', "_", *flags)
        create = ["mariadb", "--no-defaults", "-uroot", f"--socket={socket}", "-e", "create database if not exists slurm_acct"]  # fmt: skip
        wait_until(lambda: self.run(create).returncode == 0, "database", 60)
        ctl.run("env", f"SLURM_CONF={base}/slurm.conf", "slurmdbd")
        wait_until(lambda: self.run(["sacctmgr", "-n", "show", "cluster"]).returncode == 0, "slurmdbd", 60)

    def start_node(self, name: str) -> None:
        index = self.names.index(name)
        node = self.hosts[name] = Host(name, self.base)
        link = f"ve{index}"
        in_ctl = [
            "nsenter",
            "-t",
            str(self.hosts["ctl"].pid),
            "-n",
            "ip",
            "link",
        ]  # process ids are this machine's here
        subprocess.run(
            [*in_ctl, "add", link, "type", "veth", "peer", "name", "eth0", "netns", str(node.pid)],
            check=True,
            env=_environment(),
        )
        subprocess.run([*in_ctl, "set", link, "master", "br0", "up"], check=True, env=_environment())
        node.run("ip", "addr", "add", f"{NETWORK}.{10 + index}/24", "dev", "eth0")
        node.run("ip", "link", "set", "eth0", "up")
        (self.base / f"spool-{name}").mkdir(exist_ok=True)
        node.run("env", f"SLURM_CONF={self.base}/slurm.conf", "slurmd", "-N", name)

    def run(
        self,
        words: Sequence[str],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.hosts["ctl"].command("bash", "-c", 'cd "$0" && exec "$@"', str(cwd or self.base), *words),
            env={**_environment(), **self.env, **(env or {})}, capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip

    @property
    def env(self) -> dict[str, str]:
        return {"SLURM_CONF": f"{self.base}/slurm.conf"}

    def ask(self, *words: str) -> str:
        """The output of one of Slurm's commands. Raises RuntimeError where it fails."""
        done = self.run(words)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout.strip()

    def num_idle(self) -> int:
        done = self.run(["sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D"])
        return int(done.stdout.strip() or 0)

    def job(self, job_id: str) -> dict[str, str]:
        """What `scontrol show job` says, by key."""
        words = self.ask("scontrol", "show", "job", "-o", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def state(self, job_id: str) -> str:
        return self.job(job_id)["JobState"]

    def wait_for_state(self, job_id: str, *states: str, timeout_s: float = 180) -> str:
        found = wait_until(
            lambda: self.state(job_id) in states and self.state(job_id), f"job {job_id} {states}", timeout_s
        )
        return str(found)

    def stop(self) -> None:
        for host in reversed(self.hosts.values()):
            host.cut_power()
        shutil.rmtree(self.base, ignore_errors=True)


@contextlib.contextmanager
def cluster(num_nodes: int = 2, accounting: bool = False) -> Iterator[Cluster]:
    made = Cluster(num_nodes, accounting=accounting)
    try:
        made.start()
        yield made
    finally:
        made.stop()


def wait_until(is_true: Callable[[], object], what: str, timeout_s: float) -> object:
    """What `is_true` gives once it is something. Raises TimeoutError."""
    until = time.monotonic() + timeout_s
    while not (found := is_true()):
        if time.monotonic() > until:
            raise TimeoutError(f"no {what} within {timeout_s:.0f} s")
        time.sleep(0.1)
    return found
