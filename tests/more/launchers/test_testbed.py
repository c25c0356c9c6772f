"""The test cluster itself: it is what it says, and leaves nothing behind."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import testbed
from commands import ENVIRON
from launchers import LAUNCHERS, OPENMPI, Launcher
from testbed import LOGIN, Cluster, ClusterError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("machine")

TIMED_OUT = 3

SERVE_ONCE = """
import socket
server = socket.create_server(
    ("::", 29500), family=socket.AF_INET6, dualstack_ipv6=True
)
print("listening", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 16):
    pass
"""
SEND = f"""
import socket, sys
try:
    connection = socket.create_connection((sys.argv[1], 29500), timeout=2)
except TimeoutError:
    sys.exit({TIMED_OUT})
connection.sendall(bytes(1_000_000))
"""
# Its rank, as Open MPI and as Hydra tell it, the host, and where Python is. Open MPI 5
# can hang at the end of tasks that end at once (prrte#1839).
SAY = (
    *("sh", "-c"),
    "echo ${OMPI_COMM_WORLD_RANK-$PMI_RANK} $(hostname) $(which python); sleep 0.5",
)
SAID = [
    f"{rank} {host} {sys.executable}" for rank, host in enumerate(["n9", "n10", "n11"])
]
ONE_PER_NODE = {
    launcher: ["--map-by", "ppr:1:node"] if launcher in OPENMPI else ["-ppn", "1"]
    for launcher in LAUNCHERS
}
START_AND_SLEEP = """
import time
from testbed import Cluster
with Cluster(("a1", "a2")) as cluster:
    sleeper = cluster.popen(["srun", "-N2", "sh", "-c", "echo up; sleep 1000"])
    sleeper.stdout.readline()
    print("up", flush=True)
    time.sleep(1000)
"""


def is_named(process: psutil.Process, name: str) -> bool:
    with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        return bool(process.name() == name)
    return False


def send(cluster: Cluster, source: str, target: str, address: str) -> int:
    """Send a megabyte from node to node; return the sender's exit code."""
    server = cluster.popen([sys.executable, "-c", SERVE_ONCE], host=target)
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n"
    sender = cluster.run([sys.executable, "-c", SEND, address], host=source)
    cluster.end(server)
    return sender.returncode


def received(cluster: Cluster, host: str) -> dict[str, int]:
    counters = cluster.counters()[host]
    return {name: counter.rx_bytes for name, counter in counters.items()}


def running(cluster: Cluster) -> list[str]:
    """Programs on the nodes of a cluster, all but those that make it."""
    found = []
    for host in cluster.names:
        listing = cluster.run(["ps", "-eo", "args", "--no-headers"], host=host).stdout
        found += [f"{host}: {line}" for line in listing.splitlines()]
    ours = (": cat", ": ps -eo", "ssh/sshd")
    return [line for line in found if not any(part in line for part in ours)]


def machine_state() -> dict[str, object]:
    """What a cluster could change on this machine."""
    return {
        "interfaces": socket.if_nameindex(),
        "mounts": Path("/proc/self/mounts").read_text(),
        "hosts": Path("/etc/hosts").read_text(),
        "folders": set(Path(tempfile.gettempdir()).glob(f"cluster-{os.getpid()}-*")),
        "children": psutil.Process().children(),
    }


def test_three_hosts_answer(juelich: Cluster) -> None:
    answer = juelich.srun("-N3", "--label", "hostname", check=True)
    assert sorted(answer.stdout.split("\n")) == [
        "",
        "0: jwb0001",
        "1: jwb0002",
        "2: jwb0003",
    ]


def test_closed_network_lets_nothing_through(juelich: Cluster) -> None:
    before = received(juelich, "jwb0001")
    foreign = juelich.foreign_bytes("eth0")
    assert send(juelich, "jwb0002", "jwb0001", "jwb0001") == TIMED_OUT
    assert received(juelich, "jwb0001")["ib0"] - before["ib0"] < 1000
    # The attempt is on record, at both ends.
    assert 0 < juelich.foreign_bytes("eth0")["jwb0001"] - foreign["jwb0001"] < 1000
    assert 0 < juelich.foreign_bytes("eth0")["jwb0002"] - foreign["jwb0002"] < 1000


def test_fast_network_lets_all_through(juelich: Cluster) -> None:
    before = received(juelich, "jwb0001")
    foreign = juelich.foreign_bytes("eth0")
    assert send(juelich, "jwb0002", "jwb0001", "jwb0001i") == 0
    after = received(juelich, "jwb0001")
    assert after["ib0"] - before["ib0"] > 1_000_000
    assert after["eth0"] - before["eth0"] < 100_000
    assert juelich.foreign_bytes("eth0") == foreign


def test_open_network_lets_all_through(unpadded: Cluster) -> None:
    before = received(unpadded, "n10")
    assert send(unpadded, "n9", "n10", "n10") == 0
    after = received(unpadded, "n10")
    assert after["eth0"] - before["eth0"] > 1_000_000
    assert after["ib0"] - before["ib0"] < 1000
    assert unpadded.foreign_bytes("eth0")["n10"] > 1_000_000


def test_slurm_is_not_foreign(juelich: Cluster) -> None:
    before = received(juelich, "jwb0002")["eth0"]
    foreign = juelich.foreign_bytes("eth0")
    juelich.srun("-N3", "-n12", "hostname", check=True)
    assert received(juelich, "jwb0002")["eth0"] > before
    assert juelich.foreign_bytes("eth0") == foreign


def test_steps_see_gpus(juelich: Cluster) -> None:
    echo = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES $SLURM_GPUS_ON_NODE"]
    assert juelich.srun("-N2", "--gres=gpu:4", *echo).stdout == "0,1,2,3 4\n" * 2
    assert juelich.srun("-N1", *echo).stdout == "\n"


def test_names_are_private(juelich: Cluster) -> None:
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("jwb0001", None)
    assert "jwb0001" not in Path("/etc/hosts").read_text()
    for name, address in (("jwb0001", "10.10.0.1"), ("jwb0003i", "10.20.0.3")):
        found = juelich.run(["getent", "hosts", name], host="jwb0002")
        assert found.stdout.split() == [address, name]


def test_unknown_names_fail_at_once(juelich: Cluster) -> None:
    started = time.monotonic()
    assert juelich.run(["getent", "hosts", "example.org"]).returncode == 2
    assert time.monotonic() - started < 1


def test_environment_is_clean(
    juelich: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    found = juelich.run(["env"], env={"SYSTEMNAME": "juwelsbooster"})
    names = {line.partition("=")[0] for line in found.stdout.splitlines()}
    assert names == {"PATH", "HOME", "LANG", "SLURM_CONF", "SYSTEMNAME"}


def test_run_separates_outputs_and_keeps_the_exit_code(juelich: Cluster) -> None:
    done = juelich.run(["sh", "-c", "cat; echo two >&2; exit 3"], input="one\n")
    assert (done.stdout, done.stderr, done.returncode) == ("one\n", "two\n", 3)


def test_signals_reach_the_program_itself(juelich: Cluster) -> None:
    sleeper = juelich.popen(["sleep", "1000"], host="jwb0003")
    sleeper.send_signal(signal.SIGINT)
    assert sleeper.wait(timeout=5) == -signal.SIGINT
    juelich.end(sleeper)


def test_timeout_ends_the_job(juelich: Cluster) -> None:
    script = "echo before; trap '' TERM; exec sleep 1000"
    with pytest.raises(subprocess.TimeoutExpired) as expired:
        juelich.srun("-N1", "sh", "-c", script, timeout=2)
    assert expired.value.stdout == "before\n"
    assert juelich.run(["squeue", "--noheader"]).stdout == ""
    assert "sleep" not in juelich.run(["ps", "-ef"], host="jwb0001").stdout


def test_batch_script_starts_a_step_on_all_nodes(juelich: Cluster) -> None:
    batch = juelich.sbatch("#!/bin/sh\nhostname\nsrun --label hostname\nexit 5", "-N3")
    assert batch.returncode == 5
    first, *rest = batch.output.splitlines()
    assert first == "jwb0001"
    assert sorted(rest) == ["0: jwb0001", "1: jwb0002", "2: jwb0003"]


def test_batch_of_many_small_steps(juelich: Cluster) -> None:
    step = "srun -n1 --exact sh -c 'sleep 1; echo $SLURM_STEP_ID' &\n"
    started = time.monotonic()
    batch = juelich.sbatch(f"#!/bin/sh\n{step * 8}wait", "-N1", "-n8")
    assert sorted(batch.output.split()) == list("01234567")
    assert time.monotonic() - started < 6  # one after the other: eight and more


def test_batch_array(juelich: Cluster) -> None:
    batch = juelich.sbatch(
        "#!/bin/sh\necho $SLURM_ARRAY_TASK_ID\nexit $SLURM_ARRAY_TASK_ID", "--array=1-3"
    )
    assert batch.outputs == ("1\n", "2\n", "3\n")
    assert batch.returncode == 3


def test_batch_requeued(juelich: Cluster) -> None:
    script = """#!/bin/sh
        echo restarts: ${SLURM_RESTART_COUNT-none}
        [ "$SLURM_RESTART_COUNT" ] || { scontrol requeue $SLURM_JOB_ID; sleep 1000; }
    """
    batch = juelich.sbatch(script, "--requeue", "--open-mode=append")
    assert "restarts: none\n" in batch.output
    assert batch.output.endswith("restarts: 1\n")
    assert batch.returncode == 0


def test_batch_refused(juelich: Cluster) -> None:
    with pytest.raises(ClusterError, match="Node count"):
        juelich.sbatch("#!/bin/sh\n", "-N4")


def test_heterogeneous_job(juelich: Cluster) -> None:
    step = ["sh", "-c", "echo $SLURM_HET_SIZE $SLURM_PROCID $(hostname)"]
    done = juelich.srun("-N1", ":", "-N2", *step)
    assert len(set(done.stdout.splitlines())) == 3, done
    assert done.stdout.startswith("2 ")


def test_arbitrary_distribution(juelich: Cluster) -> None:
    done = juelich.srun(
        *("-n3", "--label", "--distribution=arbitrary"),
        *("--nodelist=jwb0002,jwb0001,jwb0002", "hostname"),
    )
    assert sorted(done.stdout.splitlines()) == [
        "0: jwb0002",
        "1: jwb0001",
        "2: jwb0002",
    ]


def test_salloc_opens_its_shell_on_a_node(juelich: Cluster) -> None:
    done = juelich.run(["salloc", "-N2", "--quiet", "hostname"])
    assert done.stdout == "login01\n", done
    terminal = ["script", "-qec", "salloc -N2 --quiet", "/dev/null"]
    done = juelich.run(
        terminal, env={"SHELL": "/bin/sh"}, input="echo on $(hostname)\nexit\n"
    )
    assert "on jwb0001" in done.stdout, done


def test_ssh(bare: Cluster) -> None:
    command = [bare.ssh, "-x", "n10", "hostname;", "cat;", "exit", "3"]
    done = bare.run(command, host="n9", input="said\n")
    assert (done.stdout, done.returncode) == ("n10\nsaid\n", 3)
    assert "no host n12" in bare.run([bare.ssh, "n12", "true"]).stderr


@pytest.mark.parametrize("host", [LOGIN, "n9"])
def test_launcher(bare: Cluster, launcher: Launcher, host: str) -> None:
    command = [*launcher.command(bare, "n9", "n10", "n11"), "-n", "3"]
    command += ONE_PER_NODE[launcher]
    done = bare.run([*command, *SAY], host=host, env=ENVIRON, timeout=20)
    assert sorted(done.stdout.splitlines()) == SAID, done
    assert "Warning: setpgid" in done.stderr or done.stderr == ""  # a race of mpirun's
    assert done.returncode == 0
    assert testbed._wait_until(lambda: running(bare) == [], 5), running(bare)


def test_launcher_is_ended(bare: Cluster, launcher: Launcher) -> None:
    command = [*launcher.command(bare, "n9", "n10"), "-n", "2"]
    command += [*ONE_PER_NODE[launcher], "sh", "-c", "echo up; sleep 1000"]
    program = bare.popen(command, env=ENVIRON)
    assert program.stdout is not None
    assert [program.stdout.readline() for _ in range(2)] == ["up\n"] * 2
    bare.end(program)
    assert testbed._wait_until(lambda: running(bare) == [], 5), running(bare)


def test_launcher_in_a_job_of_slurm(unpadded: Cluster, launcher: Launcher) -> None:
    command = [*launcher.in_job(unpadded), *ONE_PER_NODE[launcher], *SAY]
    script = f"#!/bin/sh\n{shlex.join(command)}"
    batch = unpadded.sbatch(script, "-N3", env=ENVIRON, timeout=30)
    assert sorted(batch.output.splitlines()) == SAID, batch
    assert batch.returncode == 0


def test_ipv6() -> None:
    with Cluster(("a1", "a2"), fast="hsn0", fast_names="{}-hsn".format, ipv6=True) as c:
        c.srun("-N2", "true", check=True)
        assert send(c, "a1", "a2", "fd20::2") == 0
        assert send(c, "a1", "a2", "a2-hsn") == 0
        assert send(c, "a1", "a2", "fd10::2") == TIMED_OUT
        assert received(c, "a2")["hsn0"] > 2_000_000
        assert c.foreign_bytes("hsn0")["a2"] > 2_000_000


def test_failing_daemon_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "_SLURM_CONF", testbed._SLURM_CONF + "Nonsense=1\n")
    before = machine_state()
    # Whichever was faster.
    message = "did not come up\nslurm(ctld|d)-.*:\n(.|\n)*Nonsense"
    with pytest.raises(ClusterError, match=message), Cluster(("a1",)):
        pass
    assert machine_state() == before


def test_nothing_is_left_behind() -> None:
    before = machine_state()
    others = set(psutil.Process().children(recursive=True))
    with Cluster(("a1", "a2")) as cluster:
        step = cluster.popen(["srun", "-N2", "sh", "-c", "echo up; sleep 1000"])
        assert step.stdout is not None
        assert step.stdout.readline() == "up\n"
        cluster.popen(["sleep", "1000"], host="a1")
        processes = set(psutil.Process().children(recursive=True)) - others
        assert any(is_named(process, "slurmctld") for process in processes)
    assert not any(process.is_running() for process in processes)
    assert machine_state() == before


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder; the path of `tmp_path` is too long for the socket of munged."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name
)
def test_nothing_is_left_behind_after_a_signal(
    number: signal.Signals, folder: Path
) -> None:
    before = machine_state()
    with subprocess.Popen(
        [sys.executable, "-c", START_AND_SLEEP],
        cwd=Path(__file__).parent,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "up\n"
            processes = psutil.Process(holder.pid).children(recursive=True)
            assert any(is_named(process, "slurmctld") for process in processes)
        except BaseException:
            holder.kill()  # it would sleep on, and be waited for
            raise
        holder.send_signal(number)
    if number == signal.SIGKILL:  # then it is the kernel that clears away, meanwhile
        _, alive = psutil.wait_procs(processes, timeout=30)
        assert alive == []
    else:
        assert not any(process.is_running() for process in processes)
        assert list(folder.iterdir()) == []
    assert machine_state() == before
