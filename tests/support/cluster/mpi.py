"""The MPI launchers of the tests: mpirun and mpiexec, of several makers.

A test types what a user types behind the hosts::

    command = OPENMPI_4.command(cluster, "n9", "n10")
    cluster.run([*command, "-np", "2", "--map-by", "ppr:1:node", "hostname"], host="n9")
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tests.support import ROOT
from tests.support.cluster.commands import (
    AS_SUGGESTED,
    ENVIRON,
    HOSTS,
    NODES,
    errors,
    see_one_world,
)
from tests.support.cluster.real_job import Program, launch
from tests.support.patience import NEVER_S, PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tests.support.cluster.testbed import Cluster

T = TypeVar("T")

# Where install.sh puts what comes from PyPI: the programs have the same names.
FOLDER = ROOT / ".launchers"

# A login that activates nothing: it has no python of this environment.
_PLAIN_SSH = """#!/bin/sh
while case $1 in -*) ;; *) false ;; esac; do shift; done
host=$1; shift
exec {ssh} $host "export PATH=/usr/sbin:/usr/bin:/sbin:/bin;" "$@"
"""


@dataclass(frozen=True)
class Launcher:
    """An MPI launcher.

    Attributes:
        name: Maker and release.
        program: Its path.
        always: Options without which it starts nothing on the test cluster.
        remote: Options that name the stand-in for ssh, which is ``{ssh}``.
        hosts: The option that takes the hosts.
    """

    name: str
    program: Path
    always: tuple[str, ...]
    remote: tuple[str, ...]
    hosts: str

    def __str__(self) -> str:
        return self.name

    def command(self, cluster: Cluster, *hosts: str) -> list[str]:
        """Return the beginning of a command line, up to the hosts.

        Args:
            cluster: Where it will run, on any host.
            *hosts: Their names, or ``NAME:SLOTS``; Intel MPI takes names only, and
                Open MPI takes a name as one slot.
        """
        remote = [option.format(ssh=cluster.ssh) for option in self.remote]
        return [*self.in_job(cluster), *remote, self.hosts, ",".join(hosts)]

    def in_job(self, cluster: Cluster) -> list[str]:
        """Return the beginning of a command line in a job of Slurm, which it asks.

        Launchers name folders in TMPDIR by nothing but process numbers.
        """
        return ["env", f"TMPDIR={cluster.tmpdir}", str(self.program), *self.always]

    def install(self, cluster: Cluster, folder: Path, *, job: bool = False) -> str:
        """Install it as ``mpirun`` or ``mpiexec``, which a user types; return the PATH.

        Args:
            cluster: Where it will run.
            folder: Where to put it.
            job: Whether it will run in a job of Slurm, which it asks.
        """
        folder.chmod(0o755)
        command = self.in_job(cluster)
        if not job:
            ssh = folder / "ssh"
            ssh.write_text(_PLAIN_SSH.format(ssh=cluster.ssh), encoding="utf-8")
            ssh.chmod(0o755)
            command += [option.format(ssh=ssh) for option in self.remote]
        program = folder / ("mpirun" if self in OPENMPI else "mpiexec")
        program.write_text(
            f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n', encoding="utf-8"
        )
        program.chmod(0o755)
        return f"{folder}:{ENVIRON['PATH']}"


_ROOT = "--allow-run-as-root"
_HYDRA = ("-launcher", "ssh", "-launcher-exec", "{ssh}")

OPENMPI_4 = Launcher(
    "Open MPI 4",
    Path("/usr/bin/mpirun.openmpi"),
    (_ROOT,),
    ("--mca", "plm", "rsh", "--mca", "plm_rsh_agent", "{ssh}"),
    "--host",
)
OPENMPI_5 = Launcher(
    "Open MPI 5",
    FOLDER / "openmpi/bin/mpirun",
    (_ROOT, "--prefix", str(FOLDER / "openmpi")),
    ("--prtemca", "plm", "ssh", "--prtemca", "plm_ssh_agent", "{ssh}"),
    "--host",
)
MPICH_4 = Launcher("MPICH 4", Path("/usr/bin/mpiexec.hydra"), (), _HYDRA, "-hosts")
MPICH_5 = Launcher("MPICH 5", FOLDER / "mpich/bin/mpiexec.hydra", (), _HYDRA, "-hosts")
INTELMPI = Launcher(
    "Intel MPI",
    FOLDER / "impi-rt/bin/mpiexec.hydra",
    (),
    ("-bootstrap", "ssh", "-bootstrap-exec", "{ssh}"),
    "-hosts",
)
OPENMPI = (OPENMPI_4, OPENMPI_5)
HYDRA = (MPICH_4, MPICH_5, INTELMPI)
LAUNCHERS = (*OPENMPI, *HYDRA)


def missing(launcher: Launcher) -> str | None:
    """Return that a launcher is not installed; None if it is."""
    if launcher.program.exists():
        return None
    return f"not installed: {launcher} (tests/support/cluster/install.sh all)"


def once(mpi: Launcher, nodes: int = 3) -> list[str]:
    """Return what a user types for one task on each node, which has all CPUs."""
    if mpi in OPENMPI:
        unbound = ["--bind-to", "none"]  # it binds up to two tasks to a CPU each
        return ["-np", str(nodes), "--map-by", "ppr:1:node", *unbound]
    return ["-n", str(nodes), "-ppn", "1"]


def run(  # noqa: PLR0913
    bare: Cluster,
    mpi: Launcher,
    *words: str,
    hosts: tuple[str, ...] = NODES,
    slots: int = 2,
    on: str = "n9",
    environ: Mapping[str, str] = ENVIRON,
) -> subprocess.CompletedProcess[str]:
    """Run a launcher on a host; what it prints is shown if the test fails.

    Open MPI is told how many slots each host has.

    Args:
        bare: The cluster.
        mpi: The launcher.
        *words: What follows its beginning.
        hosts: The nodes.
        slots: Of each node.
        on: Where it runs.
        environ: As for `Cluster.run`.
    """
    if mpi in OPENMPI:
        hosts = tuple(f"{host}:{slots}" for host in hosts)
    command = [*mpi.command(bare, *hosts), *words]
    done = unless_it_hangs(
        mpi, lambda limit: bare.run(command, host=on, env=environ, timeout=limit)
    )
    print(done.stdout, done.stderr, sep="\n")
    return done


def unless_it_hangs(mpi: Launcher, start: Callable[[float], T]) -> T:
    """Return what a run returns that gets so many seconds.

    Now and then mpirun of Open MPI 5 does not see that its last task has ended,
    whatever that was, and waits forever. That says nothing about the tasks: it gets
    more tries, and as long as any other run in the last one.
    """
    for limit in (60, 60) if mpi == OPENMPI_5 else ():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return start(limit)
    return start(PATIENCE)


def type_on_each(  # noqa: PLR0913
    bare: Cluster,
    line: str,
    hosts: Sequence[str] = HOSTS,
    *,
    codes: Sequence[int] = (),
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> tuple[list[str], str]:
    """Let a user type a line on several machines at once.

    Args:
        bare: The cluster.
        line: For a shell; on the k-th machine its ``--node_rank=0`` is k.
        hosts: The machines.
        codes: Their exit codes; 0 unless given.
        env: Variables in addition to `ENVIRON`.
        cwd: The working directory.

    Returns:
        The standard output of each machine, and the standard error of all.
    """
    with contextlib.ExitStack() as stack:
        programs = []
        for rank, host in enumerate(hosts):
            text = line.replace("--node_rank=0", f"--node_rank={rank}")
            words = ["bash", "-ec", text]
            program = Program(bare, words, host=host, environ=env, cwd=cwd)
            programs.append(stack.enter_context(program))
        ends = [program.done() for program in programs]
    assert [done.returncode for done in ends] == [*(codes or [0] * len(hosts))], ends
    return [done.stdout for done in ends], "".join(done.stderr for done in ends)


def suggested_over_ssh(
    bare: Cluster, mpi: Launcher, environ: Mapping[str, str], wrong: str, folder: Path
) -> None:
    """Run a wrong command on the first host, and then what its message suggests.

    Args:
        bare: The cluster.
        mpi: The launcher that a user finds there as mpirun or mpiexec.
        environ: Variables.
        wrong: The code of the message, and the command.
        folder: Where it runs, with a HOSTFILE.
    """
    path = mpi.install(bare, folder)
    (folder / "HOSTFILE").write_text("".join(f"{host}\n" * 2 for host in HOSTS))
    command = shlex.split(f"{AS_SUGGESTED} {wrong}")
    done = bare.run(command, host="n9", env={"PATH": path, **environ}, cwd=folder)
    see_one_world(done)


def port_is_taken(cluster: Cluster, *options: str, srun: Sequence[str] = ()) -> None:
    """See that a job names the program that has its port.

    Args:
        cluster: Where.
        *options: The launcher's.
        srun: Those of srun.
    """
    script = (
        "import socket, time; held = socket.create_server(('', 24321)); "
        f"print('listening', flush=True); time.sleep({NEVER_S})"
    )
    with Program(cluster, ["python3", "-c", script], host="n9") as holder:
        holder.says("listening")
        endpoint = "--rdzv_endpoint=n9:24321"
        done = launch(cluster, *options, endpoint, srun=srun)
    assert "n9: task 0: Exited with exit code 2" in done.stderr
    (line,) = errors(done.stderr)
    assert "HPC055]: on n9: port 24321 on 10.10.0.1 cannot be used" in line
    assert "it is taken by python3" in line
    assert "Traceback" not in done.stderr
