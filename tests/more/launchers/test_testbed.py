"""The test cluster itself: it is what it says, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.support.cluster import testbed
from tests.support.cluster.testbed import Cluster, ClusterError
from tests.support.patience import PATIENCE

pytestmark = pytest.mark.usefixtures("machine")

UNREACHABLE = 3

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
import errno, socket, sys
try:
    connection = socket.create_connection((sys.argv[1], 29500), float(sys.argv[2]))
except OSError as error:
    # IPv6's own search for the other host ends after three seconds.
    is_silent = isinstance(error, TimeoutError) or error.errno == errno.EHOSTUNREACH
    sys.exit({UNREACHABLE} if is_silent else 1)
connection.sendall(bytes(1_000_000))
"""
START_AND_SLEEP = """
import time
from tests.support.cluster.testbed import Cluster
with Cluster(("a1", "a2")) as cluster:
    sleeper = cluster.popen(["srun", "-N2", "sh", "-c", "echo up; sleep 1000"])
    sleeper.stdout.readline()
    cluster.popen(["sleep", "1000"], host="a1")
    print("up", flush=True)
    time.sleep(1000)
"""


def send(cluster, source, target, address, limit=PATIENCE):
    """Send a megabyte from node to node; return the sender's exit code."""
    server = cluster.popen([sys.executable, "-c", SERVE_ONCE], host=target)
    assert server.stdout.readline() == "listening\n"
    sender = cluster.run([sys.executable, "-c", SEND, address, str(limit)], host=source)
    cluster.end(server)
    return sender.returncode


def received(cluster, host):
    counters = cluster.counters()[host]
    return {name: counter.rx_bytes for name, counter in counters.items()}


def machine_state():
    """Return all that a cluster could change on this machine."""
    return {
        "interfaces": socket.if_nameindex(),
        "mounts": Path("/proc/self/mounts").read_text(),
        "hosts": Path("/etc/hosts").read_text(),
        "folders": set(Path(tempfile.gettempdir()).glob(f"cluster-{os.getpid()}-*")),
        "children": psutil.Process().children(),
    }


def test_closed_network_lets_nothing_through(juelich):
    before = received(juelich, "jwb0001")
    foreign = juelich.foreign_bytes("eth0")
    assert send(juelich, "jwb0002", "jwb0001", "jwb0001", limit=2) == UNREACHABLE
    assert received(juelich, "jwb0001")["ib0"] - before["ib0"] < 1000
    after = juelich.foreign_bytes("eth0")
    for host in "jwb0001", "jwb0002":  # the attempt is on record, at both ends
        assert 0 < after[host] - foreign[host] < 1000, host


def test_fast_network_lets_all_through(juelich):
    before = received(juelich, "jwb0001")
    foreign = juelich.foreign_bytes("eth0")
    assert send(juelich, "jwb0002", "jwb0001", "jwb0001i") == 0
    after = received(juelich, "jwb0001")
    assert after["ib0"] - before["ib0"] > 1_000_000
    assert after["eth0"] - before["eth0"] < 100_000
    # What Slurm sends over the other one is not counted.
    juelich.srun("-N3", "-n12", "hostname", check=True)
    assert received(juelich, "jwb0001")["eth0"] > after["eth0"]
    assert juelich.foreign_bytes("eth0") == foreign


def test_ipv6():
    with Cluster(("a1", "a2"), fast="hsn0", fast_names="{}-hsn".format, ipv6=True) as c:
        c.srun("-N2", "true", check=True)
        assert send(c, "a1", "a2", "fd20::2") == 0
        assert send(c, "a1", "a2", "a2-hsn") == 0
        assert send(c, "a1", "a2", "fd10::2") == UNREACHABLE
        assert received(c, "a2")["hsn0"] > 2_000_000
        assert c.foreign_bytes("hsn0")["a2"] > 2_000_000


def test_names_and_environment_are_private(juelich, monkeypatch):
    with pytest.raises(socket.gaierror):
        socket.getaddrinfo("jwb0001", None)
    for name, address in (("jwb0001", "10.10.0.1"), ("jwb0003i", "10.20.0.3")):
        found = juelich.run(["getent", "hosts", name], host="jwb0002")
        assert found.stdout.split() == [address, name]
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    found = juelich.run(["env"], env={"SYSTEMNAME": "juwelsbooster"})
    names = {line.partition("=")[0] for line in found.stdout.splitlines()}
    own = {"PATH", "HOME", "LANG", "SLURM_CONF", "PET_HPC_KEY_FILE"}
    assert names == own | {"SYSTEMNAME"}


def test_failing_daemon_is_reported(monkeypatch):
    monkeypatch.setattr(testbed, "_SLURM_CONF", testbed._SLURM_CONF + "Nonsense=1\n")
    before = machine_state()
    # Whichever was faster.
    message = "did not come up\nslurm(ctld|d)-.*:\n(.|\n)*Nonsense"
    with pytest.raises(ClusterError, match=message), Cluster(("a1",)):
        pass
    assert machine_state() == before


@pytest.fixture
def folder():
    """An empty folder; the path of `tmp_path` is too long for the socket of munged."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def programs_below(process):
    """Return all that a cluster has started, which is up."""
    found = process.children(recursive=True)
    names = set()
    for each in found:
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            names.add(each.name())
    assert {"slurmctld", "slurmd", "srun"} <= names, names
    return found


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name
)
def test_nothing_is_left_behind(number, folder):
    """By Ctrl-C, the block of the cluster ends as by any other exception."""
    before = machine_state()
    with subprocess.Popen(
        [sys.executable, "-c", START_AND_SLEEP],
        cwd=Path(testbed.__file__).parent,
        env=os.environ | {"TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == "up\n"
            processes = programs_below(psutil.Process(holder.pid))
        except BaseException:
            holder.kill()  # it would sleep on, and be waited for
            raise
        holder.send_signal(number)
    if number == signal.SIGKILL:  # then it is the kernel that clears away, meanwhile
        _, alive = psutil.wait_procs(processes, timeout=PATIENCE)
        assert alive == []
    else:
        assert not any(process.is_running() for process in processes)
        assert list(folder.iterdir()) == []
    assert machine_state() == before
