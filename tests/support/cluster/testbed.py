"""A real Slurm cluster on one machine, for tests.

Every host is a process that holds namespaces: network, host name, mounts and
process numbers. The hosts' networks meet in one more network namespace, the
switch, which has a bridge for each network::

    login01   eth0 10.10.0.254 ─┐
    jwb0001   eth0 10.10.0.1   ─┤ management network
    jwb0002   eth0 10.10.0.2   ─┘
    jwb0001   ib0  10.20.0.1   ─┐ fast network
    jwb0002   ib0  10.20.0.2   ─┘

The namespaces have no names and no mount points: they end with the processes
that hold them, and those end as soon as the pipe from this process closes,
however this process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

from tests.support.patience import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import TracebackType

    from typing_extensions import Self

LOGIN = "login01"
MANAGEMENT = "eth0"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SLURM_PORTS = "6817, 6818, 60001-63000"  # slurmctld, slurmd, srun
SWITCH = "switch"  # the host where the networks meet

_PROGRAMS = (
    *("slurmctld", "slurmd", "srun", "munged"),
    *("ip", "tc", "nft", "nsenter", "unshare", "mount", "env", "faketime"),
)
_CAP_SYS_ADMIN = 21
_END_TIMEOUT_S = 10
_GRACE_S = 2  # from SIGTERM to SIGKILL

# Process 1 of a host. It ignores the death of orphans, so that the kernel buries
# them, and ends at the end of its input; with it the kernel ends all the others.
# The range of ephemeral ports stays clear of Slurm's. Otherwise a listener on "port 0"
# could get a port that the closed management network lets through.
# Shared memory is a node's own: programs put nothing but process numbers into its
# names, and these are not unique across hosts. So is the folder for temporary files.
_HOLD = """
set -e
echo "$1" > /proc/sys/kernel/hostname
echo 32768 60000 > /proc/sys/net/ipv4/ip_local_port_range
if [ -d /proc/sys/net/ipv6 ]; then
    echo "$2" > /proc/sys/net/ipv6/conf/all/disable_ipv6
    echo "$2" > /proc/sys/net/ipv6/conf/default/disable_ipv6
fi
for file in hosts nsswitch.conf; do
    mount --bind "$3/$file" "/etc/$file"
done
mount -t tmpfs shm /dev/shm
mount -t tmpfs tmp "$3/tmp"
echo ready
exec env --ignore-signal=CHLD cat > /dev/null
"""

# OverSubscribe lets many small tests share the few nodes; cred_expire is also the
# time that a requeued job waits before it starts again (default: two minutes).
# While an ended job still holds nodes, Slurm would start the next job on others, and
# not on those that the tests expect. CompleteWait holds back jobs that name no nodes,
# for at most two seconds more than KillWait, which is 30.
_SLURM_CONF = """
ClusterName=testbed
SlurmctldHost={login}(10.10.0.254)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={state}/munge.socket,cred_expire=10
StateSaveLocation={state}/slurmctld
SlurmctldPidFile={state}/slurmctld.pid
SlurmdSpoolDir={state}/slurmd-%n
SlurmdPidFile={state}/slurmd-%n.pid
SlurmdLogFile={state}/slurmd-%n.log
SlurmdParameters=config_overrides
SrunPortRange=60001-63000
ReturnToService=2
ProctrackType=proctrack/linuxproc
TaskPlugin={task}
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
EnforcePartLimits=ALL
SchedulerParameters=sched_interval=1,bf_interval=1
CompleteWait=32
LaunchParameters=use_interactive_step
GresTypes=gpu
{nodes}
PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=FORCE:8
"""

# Instead of ssh, between hosts that share their files but no process numbers: a
# program asks the server of the host, and gives it its command line and its files.
# Programs of the server live on when the asking program ends, as under sshd.
_SSH = """#!{python} -IS
import socket, sys
words = sys.argv[1:]
while words and words[0].startswith("-"):
    del words[0]
host, *command = words
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    try:
        server.connect(f"{folder}/{{host}}")
    except OSError:
        sys.exit(f"ssh: no host {{host}}")
    socket.send_fds(server, [" ".join(command).encode()], [0, 1, 2])
    sys.exit(int(server.recv(3) or 255))
"""
_SSHD = """#!{python} -IS
import os, socket, subprocess, threading

def serve(client):
    command, files, _, _ = socket.recv_fds(client, 1 << 17, 3)
    program = subprocess.Popen(
        ["sh", "-c", command], stdin=files[0], stdout=files[1], stderr=files[2],
        cwd=os.environ["HOME"], start_new_session=True,
    )
    for file in files:
        os.close(file)
    status = program.wait()
    with client:
        client.send(b"%d" % (status if status >= 0 else 128 - status))

address = "{folder}/" + socket.gethostname()
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.bind(address + ".new")
server.listen(128)
os.rename(address + ".new", address)
while True:
    client, _ = server.accept()
    threading.Thread(target=serve, args=[client], daemon=True).start()
"""

_libc = ctypes.CDLL(None, use_errno=True)


class ClusterError(Exception):
    """The cluster did not start, or Slurm refused what it was told."""


class Counter(NamedTuple):
    """What went through an interface since it was made, in bytes."""

    rx_bytes: int
    tx_bytes: int


@dataclass(frozen=True)
class Batch:
    """The end of a batch job.

    Attributes:
        job_id: The job's number; of an array, the array's.
        returncode: The highest exit code of its elements; 128 + n after signal n.
        outputs: What each element wrote, stdout and stderr together, in the order
            of the elements. A job that is no array has one.
    """

    job_id: int
    returncode: int
    outputs: tuple[str, ...]

    @property
    def output(self) -> str:
        """What all elements wrote."""
        return "".join(self.outputs)


class Submitted(NamedTuple):
    """A batch job, which may still run.

    Attributes:
        job: Its number; of an array, the array's.
        folder: Where each element writes into a file of its own, by its number.
        command: The command line.
    """

    job: str
    folder: Path
    command: Sequence[str]

    @property
    def outputs(self) -> tuple[str, ...]:
        """What each element wrote so far; see `Batch`."""
        files = sorted(self.folder.iterdir(), key=lambda file: int(file.name))
        return tuple(
            file.read_text(encoding="utf-8", errors="replace") for file in files
        )


class _Daemon(NamedTuple):
    process: subprocess.Popen[str]
    log: Path


def missing() -> str | None:
    """Return why no cluster can be started here; None if it can."""
    if sys.platform != "linux":
        return "a cluster needs Linux"
    if os.geteuid() != 0:
        return "a cluster needs root"
    status = Path("/proc/self/status").read_text(encoding="ascii")
    capabilities = int(status.partition("CapEff:")[2].split()[0], 16)
    if not capabilities >> _CAP_SYS_ADMIN & 1:
        return "a cluster needs CAP_SYS_ADMIN, which this container does not have"
    absent = [name for name in _PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (tests/support/cluster/install.sh)"
    return None


class Cluster:
    """Slurm on hosts of their own, from ``__enter__`` to ``__exit__``.

    Args:
        names: The compute nodes. The k-th has the addresses 10.10.0.k and 10.20.0.k.
        management: What the compute nodes take from each other on ``eth0``:
            "closed", only Slurm's ports and established connections, as at Jülich;
            "open", everything.
        fast: The name of the fast network's interface.
        fast_names: From a node's name to its name on the fast network. If both are
            the same, the name stands for the fast network's address only.
        gpus: Fake GPUs of a node. Slurm hands them out; nothing can compute on them.
        cpus: CPUs that a node claims to have.
        affinity: Whether Slurm gives each task its CPUs only; needs real ones.
        ipv6: Whether hosts have IPv6 addresses too (fd10::k and fd20::k), and their
            names stand for both.
        slurm: Whether Slurm runs there; without it, the hosts are up in a second.
    """

    def __init__(  # noqa: PLR0913
        self,
        names: Sequence[str] = ("jwb0001", "jwb0002", "jwb0003"),
        *,
        management: Literal["closed", "open"] = "closed",
        fast: str = "ib0",
        fast_names: Callable[[str], str] = "{}i".format,
        gpus: int = 4,
        cpus: int = 8,
        affinity: bool = False,
        ipv6: bool = False,
        slurm: bool = True,
    ) -> None:
        self.names = tuple(names)
        self.management = management
        self.fast = fast
        self.fast_names = fast_names
        self.gpus = gpus
        self.cpus = cpus
        self.affinity = affinity
        self.ipv6 = ipv6
        self.slurm = slurm
        self._numbers = {LOGIN: 254} | {n: k for k, n in enumerate(names, start=1)}
        self._holders: dict[str, subprocess.Popen[str]] = {}
        self._programs: dict[subprocess.Popen[str], tuple[str, str]] = {}
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_sigterm_as_sigint())
            prefix = f"cluster-{os.getpid()}-"
            self._state = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
            )
            # Not where containers have something else.
            self._key = Path(f"{self._state}.key")
            stack.callback(self._key.unlink, missing_ok=True)
            stack.callback(self._end_hosts)
            self._write_files()
            for name in (SWITCH, *self._numbers):
                self._start_host(name)
            self._connect_hosts()
            if self.slurm:
                self._start_slurm()
            self._exit = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._exit.close()

    # Programs on hosts

    def popen(  # noqa: PLR0913
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        host: str = LOGIN,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | IO[str] | None = subprocess.DEVNULL,
        stdout: int | IO[str] | None = subprocess.PIPE,
        stderr: int | IO[str] | None = subprocess.PIPE,
        new_session: bool = True,
    ) -> subprocess.Popen[str]:
        """Start a program on a host.

        The process is the program itself: signals and the exit code are its own.
        A program that still runs when the cluster ends is killed.

        Args:
            argv: The program and its arguments.
            host: A compute node's name, the login node's, or the switch's.
            env: Variables to add to the few that every program gets (PATH, HOME,
                LANG and, with Slurm, SLURM_CONF; nothing is inherited).
            cwd: The working directory; by default that of this process.
            stdin: As in `subprocess.Popen`, but empty by default.
            stdout: As in `subprocess.Popen`.
            stderr: As in `subprocess.Popen`.
            new_session: Whether to leave this process's session and terminal.
        """
        holder = self._holders[host].pid
        with _born_in(Path(f"/proc/{holder}/ns/pid_for_children")):
            program = subprocess.Popen(
                [
                    *("nsenter", f"--target={holder}", "--net", "--uts", "--mount"),
                    *("env", f"--chdir={cwd or Path.cwd()}", *argv),
                ],
                env=self._environ() | dict(env or {}),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                start_new_session=new_session,
                text=True,
            )
        self._programs[program] = host, _number_on_host(program)
        return program

    def run(  # noqa: PLR0913
        self,
        argv: Sequence[str | os.PathLike[str]],
        *,
        host: str = LOGIN,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float = PATIENCE,
        input: str | None = None,  # noqa: A002 - the name in subprocess.run
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host and return its exit code, stdout and stderr.

        Args:
            argv: The program and its arguments.
            host: A compute node's name, or the login node's.
            env: As for `popen`.
            cwd: As for `popen`.
            timeout: Seconds after which the program and its jobs are ended.
            input: What the program reads; nothing by default.
            check: Whether an exit code other than 0 is an error.

        Raises:
            subprocess.TimeoutExpired: With the output so far.
            subprocess.CalledProcessError: If `check` and the program failed.
        """
        stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
        # Files and not pipes: a descendant that lives on can keep a pipe open.
        with _text_file() as stdout, _text_file() as stderr:
            where: dict[str, Any] = {"host": host, "env": env, "cwd": cwd}
            program = self.popen(
                argv, **where, stdin=stdin, stdout=stdout, stderr=stderr
            )
            try:
                program.communicate(input, timeout)
            except subprocess.TimeoutExpired:
                self.end(program)
                expired = subprocess.TimeoutExpired(
                    list(argv), timeout, _text(stdout), _text(stderr)
                )
                if sys.version_info >= (3, 11):
                    expired.add_note(f"{_text(stdout)}\n{_text(stderr)}")
                raise expired from None
            except BaseException:
                self.end(program)
                raise
            completed = subprocess.CompletedProcess(
                list(argv), program.returncode, _text(stdout), _text(stderr)
            )
        del self._programs[program]
        if check:
            completed.check_returncode()
        return completed

    def end(self, program: subprocess.Popen[str]) -> None:
        """End a program of `popen`, its session's group, and the jobs it submitted."""
        host, session = self._programs.pop(program)
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGTERM)
            # Not yet collected: as long as the leader is there, even as a zombie,
            # the group's number cannot become somebody else's.
            _wait_until(lambda: _has_ended(program.pid), _GRACE_S)
            os.killpg(program.pid, signal.SIGKILL)
            program.wait()
        if not self.slurm:
            return
        self._cancel(
            [
                job
                for job, node, sid in self._queue("JobID", "AllocNodes", "AllocSID")
                if (node, sid) == (host, session)
            ]
        )

    @functools.cached_property
    def ssh(self) -> Path:
        """A stand-in for ssh: ``SSH [-OPTION...] HOST COMMAND``, on and to all hosts.

        The command finds this Python first in its PATH, as if the user's profile
        activated the environment, and has `tmpdir` as its TMPDIR.
        """
        folder = self._state / "ssh"
        folder.mkdir()
        for name, text in ("ssh", _SSH), ("sshd", _SSHD):
            program = folder / name
            program.write_text(
                text.format(python=sys.executable, folder=folder), encoding="utf-8"
            )
            program.chmod(0o755)
        environ = {
            "PATH": f"{Path(sys.executable).parent}:{PATH}",
            "TMPDIR": str(self.tmpdir),
        }
        servers = [
            self._start_daemon(f"{folder}/sshd", host=host, env=environ)
            for host in self._numbers
        ]
        self._wait_for_daemons(
            lambda: all((folder / host).exists() for host in self._numbers), servers
        )
        return folder / "ssh"

    @property
    def tmpdir(self) -> Path:
        """A folder for temporary files: under one path, each host has its own."""
        return self._state / "tmp"

    def new_folder(self) -> Path:
        """Make a folder, which is removed when the cluster ends."""
        return Path(tempfile.mkdtemp(dir=self._state))

    def srun(
        self, *args: str | os.PathLike[str], **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run ``srun`` with these arguments; the options are those of `run`."""
        return self.run(["srun", *args], **options)

    def sbatch(
        self, script: str, *args: str, timeout: float = PATIENCE, **options: Any
    ) -> Batch:
        """Submit a batch script and wait until its job has ended.

        Args:
            script: As for `submit`.
            *args: As for `submit`.
            timeout: As for `wait`.
            **options: As for `submit`.
        """
        return self.wait(self.submit(script, *args, **options), timeout)

    def submit(
        self,
        script: str,
        *args: str,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
    ) -> Submitted:
        """Submit a batch script.

        Args:
            script: The text of the script.
            *args: Options of sbatch, all but ``--output``.
            env: As for `popen`.
            cwd: As for `popen`.

        Raises:
            ClusterError: If sbatch refuses the script.
        """
        folder = self.new_folder()
        outputs = folder / "outputs"
        outputs.mkdir()
        path = folder / "script.sh"
        path.write_text(script, encoding="utf-8")
        command = ["sbatch", "--parsable", f"--output={outputs}/%a", *args, str(path)]
        submitted = self.run(command, env=env, cwd=cwd)
        if submitted.returncode != 0:
            raise ClusterError(submitted.stderr.strip())
        return Submitted(submitted.stdout.strip(), outputs, command)

    def wait(self, submitted: Submitted, timeout: float = PATIENCE) -> Batch:
        """Wait until a batch job has ended.

        Args:
            submitted: The job.
            timeout: Seconds after which the job is cancelled.

        Raises:
            subprocess.TimeoutExpired: With the output so far.
        """
        # sbatch --wait looks at first after two seconds, then ever more rarely.
        job, _, command = submitted
        ended = self._wait_for(job, timeout)
        if not ended:
            self._cancel([job])
            output = "".join(submitted.outputs)
            print(output)
            raise subprocess.TimeoutExpired(command, timeout, output=output)
        print(*submitted.outputs)  # shown if the test fails
        return Batch(int(job), self._exit_code(job), submitted.outputs)

    # The networks

    def counters(self) -> dict[str, dict[str, Counter]]:
        """Read what went through every host's interfaces: host, interface, bytes."""
        counters: dict[str, dict[str, Counter]] = {}
        for name in self._numbers:
            table = Path(f"/proc/{self._holders[name].pid}/net/dev")
            counters[name] = {}
            for line in table.read_text(encoding="ascii").splitlines()[2:]:
                interface, _, values = line.partition(":")
                columns = values.split()
                counters[name][interface.strip()] = Counter(
                    int(columns[0]), int(columns[8])
                )
        return counters

    def foreign_bytes(self, interface: str = MANAGEMENT) -> dict[str, int]:
        """Count what is not Slurm's on an interface, by host.

        Returns:
            Bytes of IP packets, in and out, since the start: all but those from or
            to Slurm's ports and ICMPv6. A packet that the closed management network
            drops counts too.
        """
        foreign = {}
        for name in self._numbers:
            listing = json.loads(
                self.configure(name, "nft", "--json", "list", "counters")
            )
            foreign[name] = sum(
                item["counter"]["bytes"]
                for item in listing["nftables"]
                if item.get("counter", {}).get("name") == f"foreign_{interface}"
            )
        return foreign

    def cut(self, host: str, *networks: str) -> None:
        """Let nothing through on a network between a host and the others.

        The interface stays up; its packets go nowhere, as behind a broken switch.
        Without any, it is the fast network.
        """
        for network in networks or (self.fast,):
            port = f"{network}.{self._numbers[host]}"
            self.configure(SWITCH, "ip", "link", "set", port, "nomaster")

    def heal(self, host: str) -> None:
        """Undo `cut`."""
        port = self.port(host)
        self.configure(SWITCH, "ip", "link", "set", port, "master", self.fast)

    def reject(self, host: str, *hooks: str) -> None:
        """Let a firewall answer TCP on the fast network of a host with a reset.

        Args:
            host: The host.
            *hooks: What it rejects: ``input``, what the host is sent; ``output``, what
                it sends. Without any it rejects nothing any more.
        """
        sides = {"input": "iifname", "output": "oifname"}
        rules = [
            f"chain {hook} {{ type filter hook {hook} priority 0; {sides[hook]} "
            f'"{self.fast}" meta l4proto tcp reject with tcp reset; }}'
            for hook in hooks
        ]
        lines = ["table inet rejecting", "delete table inet rejecting"]
        lines += ["table inet rejecting {", *rules, "}"]
        self.configure(host, "nft", "-f", "-", lines=lines)

    def port(self, host: str) -> str:
        """Return the name of the switch's end of a host's link to the fast network."""
        return f"{self.fast}.{self._numbers[host]}"

    def configure(self, host: str, *argv: str, lines: Sequence[str] = ()) -> str:
        """Run a program in nothing but a host's network namespace.

        Args:
            host: A host, or the switch.
            *argv: The program and its arguments.
            lines: What it reads.

        Returns:
            What it wrote to stdout.

        Raises:
            ClusterError: If it failed.
        """
        holder = self._holders[host].pid
        done = subprocess.run(
            ["nsenter", f"--target={holder}", "--net", *argv],
            env=self._environ(),
            input="\n".join((*lines, "")),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(argv)} on {host}: {done.stderr.strip()}")
        return done.stdout

    # How it is made

    def _environ(self) -> dict[str, str]:
        environ = {"PATH": PATH, "HOME": str(Path.home()), "LANG": "C.UTF-8"}
        # Each host has a home of its own, as the launcher sees it: a local disk.
        environ["PET_HPC_KEY_FILE"] = str(self._key)
        if self.slurm:
            environ["SLURM_CONF"] = str(self._state / "slurm.conf")
        return environ

    def _write_files(self) -> None:
        state = self._state
        hosts = ["127.0.0.1 localhost"]
        for name, number in self._numbers.items():
            if name == LOGIN or self.fast_names(name) != name:
                hosts.append(f"10.10.0.{number} {name}")
                if self.ipv6:
                    hosts.append(f"fd10::{number} {name}")
            if name != LOGIN:
                hosts.append(f"10.20.0.{number} {self.fast_names(name)}")
                if self.ipv6:
                    hosts.append(f"fd20::{number} {self.fast_names(name)}")
        # Slurm wants the GPUs' files to be devices; these are all /dev/null.
        gpus = [state / f"gpu{number}" for number in range(self.gpus)]
        for gpu in gpus:
            os.mknod(gpu, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        nodes = [
            f"NodeName={name} NodeAddr=10.10.0.{self._numbers[name]}"
            f" CPUs={self.cpus} Gres=gpu:{self.gpus}"
            for name in self.names
        ]
        slurm_conf = _SLURM_CONF.format(
            login=LOGIN,
            state=state,
            task="task/affinity" if self.affinity else "task/none",
            nodes="\n".join(nodes),
        )
        files = {
            "hosts": "\n".join(hosts) + "\n",
            # No DNS: what is not in the hosts file is unknown, and at once.
            "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
            "slurm.conf": slurm_conf,
            "gres.conf": "".join(f"Name=gpu File={gpu}\n" for gpu in gpus),
        }
        for name, text in files.items():
            (state / name).write_text(text, encoding="utf-8")
        key = state / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        for folder in ("tmp", "slurmctld", *(f"slurmd-{name}" for name in self.names)):
            (state / folder).mkdir()

    def _start_host(self, name: str) -> None:
        log = self._state / f"host-{name}.log"
        with log.open("w") as stderr:
            holder = subprocess.Popen(
                [
                    *("unshare", "--net", "--uts", "--mount", "--pid", "--fork"),
                    *("--mount-proc", "--kill-child", "sh", "-c", _HOLD, "sh"),
                    *(name, "0" if self.ipv6 else "1", str(self._state)),
                ],
                env=self._environ(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,  # Ctrl-C in a terminal is for this process
                text=True,
            )
        self._holders[name] = holder
        if holder.stdout is None or holder.stdout.readline() != "ready\n":
            raise ClusterError(f"host {name} did not start:\n{_tail(log)}")

    def _connect_hosts(self) -> None:
        networks = {MANAGEMENT: 10, self.fast: 20}
        links = [f"link add {network} type bridge" for network in networks]
        links += [f"link set {network} up" for network in networks]
        for name, number in self._numbers.items():
            setup = ["link set lo up"]
            for network, prefix in networks.items():
                if (name, network) == (LOGIN, self.fast):
                    continue
                port = f"{network}.{number}"
                peer = f"peer name {network} netns {self._holders[name].pid}"
                links += [
                    f"link add {port} type veth {peer}",
                    f"link set {port} master {network} up",
                ]
                setup.append(f"addr add 10.{prefix}.0.{number}/24 dev {network}")
                if self.ipv6:
                    address = f"fd{prefix}::{number}/64"
                    setup.append(f"addr add {address} dev {network} nodad")
                setup.append(f"link set {network} up")
            # The switch's end of a link has to be there before the host's.
            self.configure(SWITCH, "ip", "-batch", "-", lines=links)
            links = []
            self.configure(name, "ip", "-batch", "-", lines=setup)
            self.configure(name, "nft", "-f", "-", lines=self._rules(name))

    def _rules(self, name: str) -> list[str]:
        """Return a host's packet filter: counters, and the closed network's rule."""
        slurm = f"th sport {{ {SLURM_PORTS} }}", f"th dport {{ {SLURM_PORTS} }}"
        rules = ["table inet testbed {"]
        rules += [
            f"counter foreign_{network} {{}}" for network in (MANAGEMENT, self.fast)
        ]
        for hook, side in ("input", "iifname"), ("output", "oifname"):
            rules.append(f"chain count_{hook} {{")
            rules.append(f"type filter hook {hook} priority -10;")
            rules += [f"meta l4proto tcp {port} accept" for port in slurm]
            rules.append("meta l4proto ipv6-icmp accept")
            rules += [
                f'{side} "{network}" counter name foreign_{network}'
                for network in (MANAGEMENT, self.fast)
            ]
            rules.append("}")
        if self.management == "closed" and name != LOGIN:
            rules += [
                "chain closed {",
                "type filter hook input priority 0;",
                f'iifname != "{MANAGEMENT}" accept',
                "ct state established accept",
                f"tcp dport {{ {SLURM_PORTS} }} accept",
                "ip saddr 10.10.0.1-10.10.0.253 drop",
                "ip6 saddr fd10::1-fd10::253 drop",
                "}",
            ]
        rules.append("}")
        return rules

    def _start_slurm(self) -> None:
        state = self._state
        socket = state / "munge.socket"
        # --force: the folder may lie in one that nobody but root can enter.
        munged = self._start_daemon(
            *("munged", "--foreground", "--force", f"--key-file={state}/munge.key"),
            *(f"--socket={socket}", f"--pid-file={state}/munged.pid"),
            *(f"--log-file={state}/munged.log", f"--seed-file={state}/munged.seed"),
        )
        self._wait_for_daemons(socket.exists, [munged])
        daemons = [self._start_daemon("slurmctld", "-D")]
        daemons += [
            self._start_daemon("slurmd", "-D", "-N", name, host=name)
            for name in self.names
        ]
        self._wait_for_daemons(self._idle, daemons)

    def _start_daemon(
        self, *argv: str, host: str = LOGIN, env: Mapping[str, str] | None = None
    ) -> _Daemon:
        log = self._state / f"{Path(argv[0]).name}-{host}.stderr"
        with log.open("w") as stderr:
            process = self.popen(
                argv,
                host=host,
                env=env,
                cwd=self._state,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
        return _Daemon(process, log)

    def _wait_for_daemons(
        self, ready: Callable[[], bool], daemons: Sequence[_Daemon]
    ) -> None:
        def ended() -> list[_Daemon]:
            return [daemon for daemon in daemons if daemon.process.poll() is not None]

        _wait_until(lambda: bool(ended()) or ready(), PATIENCE)
        if ended() or not ready():
            logs = [f"{d.log.name}:\n{_tail(d.log)}" for d in ended() or daemons]
            raise ClusterError("a daemon did not come up\n" + "\n".join(logs))

    def _idle(self) -> bool:
        sinfo = self.run(["sinfo", "--noheader", "--Node", "--format=%t"])
        return sinfo.stdout.split() == ["idle"] * len(self.names)

    def _end_hosts(self) -> None:
        for holder in self._holders.values():
            if holder.stdin is not None:
                holder.stdin.close()
        # A host ends when this process has collected those that it started there.
        for process in (*self._programs, *self._holders.values()):
            _collect(process)
        for holder in self._holders.values():
            if holder.stdout is not None:
                holder.stdout.close()
        self._programs.clear()
        self._holders.clear()

    # Slurm's jobs

    def _queue(self, *fields: str, jobs: str | None = None) -> list[list[str]]:
        """Return these fields (names of ``squeue --Format``) of all jobs not ended."""
        command = ["squeue", "--noheader", f"--Format={','.join(fields)}"]
        if jobs is not None:
            command.append(f"--jobs={jobs}")
        listing = self.run(command, check=True).stdout
        return [line.split() for line in listing.splitlines()]

    def _wait_for(self, jobs: str, timeout: float) -> bool:
        """Wait for the end of jobs; False if they have not ended in time."""
        return _wait_until(lambda: not self._queue("JobID", jobs=jobs), timeout)

    def _cancel(self, jobs: Sequence[str]) -> None:
        """End jobs at once: no thirty seconds of grace (KillWait)."""
        if jobs:
            self.run(["scancel", "--full", "--signal=KILL", *jobs])
            self.run(["scancel", *jobs])
            self._wait_for(",".join(jobs), PATIENCE)

    def _exit_code(self, job: str) -> int:
        shown = self.run(["scontrol", "--oneliner", "show", "job", job], check=True)
        codes = []
        for word in shown.stdout.split():
            name, _, value = word.partition("=")
            if name == "ExitCode":
                code, _, signal_number = value.partition(":")
                codes.append(
                    128 + int(signal_number) if int(signal_number) else int(code)
                )
        return max(codes)


@contextlib.contextmanager
def _born_in(pid_namespace: Path) -> Iterator[None]:
    """Let what this thread starts meanwhile be born in another pid namespace.

    ``nsenter --pid`` would have to fork, and its caller would hold nsenter's
    process number, which takes no signals for the program.
    """
    with Path("/proc/self/ns/pid").open() as own, pid_namespace.open() as other:
        _setns(other.fileno())
        try:
            yield
        finally:
            _setns(own.fileno())


def _setns(file: int) -> None:
    if _libc.setns(file, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextlib.contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    """Turn SIGTERM into KeyboardInterrupt, so that the cluster is cleared away."""
    ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    if ours:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _number_on_host(program: subprocess.Popen[str]) -> str:
    """Return a program's process number as its host, and so Slurm, counts it."""
    status = Path(f"/proc/{program.pid}/status").read_text(encoding="utf-8")
    return status.partition("NSpid:")[2].splitlines()[0].split()[-1]


def _collect(process: subprocess.Popen[str]) -> None:
    """Wait for the end of a process that should end, and see to it that it does."""
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _has_ended(pid: int) -> bool:
    """Tell whether a child has ended, without collecting it."""
    options = os.WEXITED | os.WNOWAIT | os.WNOHANG
    return os.waitid(os.P_PID, pid, options) is not None


def _wait_until(condition: Callable[[], bool], timeout: float) -> bool:
    """Wait until it holds; False if it did not within these seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _text_file() -> IO[str]:
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])
