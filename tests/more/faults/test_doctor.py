"""The doctor, on real links with a rate of 1 Gbit/s, and with real faults.

DOCTOR_RUNS=20 repeats what is to be found every time, and what never is.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import links
import pytest
import torch
from commands import ENVIRON, JUELICH, NODES, lines
from launchers import LAUNCHERS, MPICH_5, OPENMPI, OPENMPI_4, Launcher, once, run
from pages import block, replaced
from steps import step
from waiting import PATIENCE

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from testbed import Cluster

DOCTOR = ("python", "-m", "torchrun_hpc.doctor")
SMALL = "--max-bytes=8"  # of the collectives: the links are what it is about
STEP = ("-N3", "--ntasks-per-node=1")
# All of them with DOCTOR_RUNS: how they name nodes is tested elsewhere.
CHOSEN = LAUNCHERS if "DOCTOR_RUNS" in os.environ else (OPENMPI_4, MPICH_5)
RUNS = int(os.environ.get("DOCTOR_RUNS", "1"))
again = pytest.mark.usefixtures("number")


@pytest.fixture(params=range(RUNS))
def number(request: pytest.FixtureRequest) -> int:
    """Which of the repetitions it is."""
    return int(request.param)


@pytest.fixture(scope="module")
def shaped(juelich: Cluster) -> Iterator[Cluster]:
    """Links of 1 Gbit/s: those of two cores alone are noise."""
    with links.shaped(juelich):
        yield juelich


class Examined(NamedTuple):
    """What came of an examination."""

    report: dict[str, Any]
    done: subprocess.CompletedProcess[str]

    @property
    def suspects(self) -> list[tuple[str, list[int]]]:
        """Codes and nodes of what is suspect."""
        found = self.report["findings"]
        return [(f["code"], f["nodes"]) for f in found if f["is_suspect"]]

    @property
    def last_line(self) -> str:
        """The verdict."""
        return self.done.stdout.strip().splitlines()[-1]

    def text(self, code: str) -> str:
        """Return the text of the findings with a code."""
        found = self.report["findings"]
        return "; ".join(f["text"] for f in found if f["code"] == code)


def examined(
    done: subprocess.CompletedProcess[str], file: Path, code: int | None = 0
) -> Examined:
    """Read what an examination has written; without a code, whatever it says.

    Links without a rate of their own are noise here.
    """
    print(done.stdout, done.stderr)
    assert code in (None, done.returncode), done.stderr
    assert "Traceback" not in done.stderr
    return Examined(json.loads(file.read_text()), done)


def typed(
    cluster: Cluster, folder: Path, words: str, instead: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Type what the page has, for the three nodes of a cluster."""
    small = {"srun": shlex.join(["srun", *STEP])} | instead
    text = replaced(block("docs/doctor.md", words).text, small)
    return cluster.run(["bash", "-ec", text], env=JUELICH, cwd=folder)


# --- links ------------------------------------------------------------------------


@again
def test_a_healthy_cluster(shaped: Cluster, tmp_path: Path) -> None:
    done = typed(shaped, tmp_path, "monday.json", {".doctor": f".doctor {SMALL}"})
    found = examined(done, tmp_path / "monday.json")
    assert found.suspects == []
    assert found.last_line == "no node is suspect"
    report = found.report
    assert report["hosts"] == list(shaped.names)
    assert [(x["first"], x["second"]) for x in report["links"]] == [
        (0, 1), (0, 2), (1, 2),
    ]  # fmt: skip
    for link in report["links"]:
        assert 0.85 < min(link["forward"], link["backward"]) * 8e-9 < 1.05
        assert (link["lost_mtu"], link["problem"]) == (0, "")
        assert abs(link["clock_s"]) < 0.1
    assert report["links"][2]["networks"] == {"eth0": False}  # as it is to be there
    assert {node["interface"] for node in report["nodes"]} == {"ib0"}
    assert report["backend"] == "gloo"
    assert {row["operation"]: row["wrong"] for row in report["collectives"]} == {
        "all_reduce": 0, "all_gather": 0, "reduce_scatter": 0, "broadcast": 0,
    }  # fmt: skip
    # Who waits sees how far it is, and what it costs.
    pairs = "HPC177 3 nodes: 3 pairs in 3 rounds, at most 1.1 GiB of traffic"
    assert done.stderr.count(pairs) == 2
    assert "HPC200 compared with 3 nodes of " in done.stderr


LINKS: dict[str, tuple[Callable[[Cluster], Any], str, list[int], str]] = {
    "half the rate": (
        lambda cluster: links.throttled(cluster, "jwb0002"),
        *("HPC191", [1], r"jwb0002, with 2 of 2 nodes: 4\d\d Mbit/s, and 9\d\d Mbit/s"),
    ),
    "what it sends": (
        lambda cluster: links.throttled(cluster, "jwb0003", egress_only=True),
        *("HPC191", [2], r"jwb0003, with 2 of 2 nodes: 4\d\d Mbit/s"),
    ),
    "losses": (
        lambda cluster: links.lossy(cluster, "jwb0001"),
        *("HPC191", [0], r"jwb0001, with 2 of 2 nodes: .*% of the segments are sent"),
    ),
    "5 ms more": (
        lambda cluster: links.delayed(cluster, "jwb0001"),
        *("HPC191", [0], r"jwb0001, with 2 of 2 nodes: .*\b[56]\.\d ms there and back"),
    ),
    "an MTU that does not fit": (
        lambda cluster: links.small_mtu(cluster, "jwb0002"),
        *("HPC189", [1], r"jwb0002, with 2 of 2 nodes: packets of 9000 bytes"),
    ),
    "a firewall": (
        lambda cluster: links.firewalled(cluster, "jwb0002", "jwb0003"),
        *("HPC190", [], "jwb0002 cannot open a connection to jwb0003, no answer"),
    ),
}


@again
@pytest.mark.parametrize("fault", LINKS)
def test_a_bad_link(shaped: Cluster, fault: str, tmp_path: Path) -> None:
    caused, code, nodes, text = LINKS[fault]
    with caused(shaped):
        done = typed(shaped, tmp_path, "=gpu", {"=gpu": f"=1 {SMALL} --json=file"})
    found = examined(done, tmp_path / "file", 1)
    assert found.suspects == [(code, nodes)]
    assert re.search(text, found.text(code))
    if nodes:
        assert found.last_line == f"--exclude={shaped.names[nodes[0]]}"
    else:
        assert "--exclude" not in found.done.stdout


def test_two_nodes_alone(shaped: Cluster, tmp_path: Path) -> None:
    """It is one of them; nobody knows which."""
    file = tmp_path / "report.json"
    with links.throttled(shaped, "jwb0002", egress_only=True):
        done = shaped.srun(
            *("-N2", "--nodelist=jwb0001,jwb0002", "--ntasks-per-node=1"),
            *DOCTOR, SMALL, f"--json={file}", env=JUELICH,
        )  # fmt: skip
    found = examined(done, file, 1)
    assert found.suspects == [("HPC191", [])]
    assert found.text("HPC191").startswith("between jwb0001 and jwb0002: 4")
    assert "--exclude" not in done.stdout


# --- nodes ------------------------------------------------------------------------

# Each on a node of its own, in one examination: commands in front of the doctor.
SPOILED = {
    0: "exec faketime -f +60s",
    1: "mount -t tmpfs -o size=1m tmpfs {small}; export TMPDIR={small}; "
    "dd if=/dev/zero of={small}/all 2> /dev/null; exec",
    2: "mount --bind {folder}/version.py {version}; "
    "mount --bind {folder}/hosts /etc/hosts; exec",
}


def test_bad_nodes(shaped: Cluster, tmp_path: Path) -> None:
    """A clock, a full disk, another torch, a wrong hosts file."""
    version = torch.version.__file__
    (tmp_path / "version.py").write_text(
        f"{open(version).read()}\n__version__ = '2.12.0'\n"  # noqa: PTH123, SIM115
    )
    hosts = (shaped.tmpdir.parent / "hosts").read_text()
    (tmp_path / "hosts").write_text(
        hosts.replace("10.20.0.1 jwb0001i", "10.20.0.1 jwb0001i other").replace(
            "10.20.0.3 jwb0003i", "10.20.0.33 jwb0003i"
        )
    )
    small = tmp_path / "small"
    small.mkdir()
    names = {"folder": tmp_path, "version": version, "small": small}
    file = tmp_path / "report.json"
    spoiled = "".join(
        f'test $SLURM_NODEID = {rank} && {{ {how.format(**names)} "$@"; }}; '
        for rank, how in SPOILED.items()
    )
    done = shaped.srun(
        *STEP, "unshare", "--mount", "sh", "-c", spoiled, "sh",
        *DOCTOR, SMALL, f"--json={file}", env=JUELICH,
    )  # fmt: skip
    found = examined(done, file, 1)
    assert sorted(found.suspects) == [
        ("HPC181", [2]), ("HPC182", [2]), ("HPC183", [0]), ("HPC184", [1]),
    ]  # fmt: skip
    assert "torch: 2.12.0 on jwb0003; 2.13.0+cpu on 2 others" in found.text("HPC181")
    assert "jwb0003i means 10.20.0.33" in found.text("HPC182")
    assert re.search(r"clock of jwb0001 is (59|60)\.\d s ahead", found.text("HPC183"))
    assert str(small) in found.text("HPC184")


def test_a_torch_that_cannot_be_imported(shaped: Cluster, tmp_path: Path) -> None:
    """Not even on node 0: all are examined all the same, and torch runs elsewhere.

    So are they where a launch would be refused, because of a variable on one node.
    """
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: not found')")
    broken = f"test $SLURM_NODEID = 0 && export PYTHONPATH={tmp_path}; "
    broken += "test $SLURM_NODEID = 1 && export PET_NNODES=2; exec "
    file = tmp_path / "report.json"
    done = shaped.srun(
        *STEP, "sh", "-c", f'{broken}"$@"', "sh", *DOCTOR, SMALL, f"--json={file}",
        env=JUELICH,
    )  # fmt: skip
    found = examined(done, file, 1)
    assert found.suspects == [("HPC185", [0]), ("HPC070", [])]
    assert found.text("HPC070").startswith("on jwb0002: PET_NNODES=2, but ")
    assert "libcudart.so: not found" in found.text("HPC185")
    assert {row["wrong"] for row in found.report["collectives"]} == {0}
    assert len(found.report["links"]) == 3


# --- nodes that do not take part --------------------------------------------------


def send(cluster: Cluster, host: str, module: str, number: signal.Signals) -> None:
    """Send a signal to the processes of a module on one node."""
    code = (
        f"import psutil; [p.send_signal({int(number)}) for p in "
        f"psutil.process_iter(['cmdline']) if {module!r} in (p.info['cmdline'] or [])]"
    )
    cluster.run(["python", "-c", code], host=host, env=ENVIRON, check=True)


def test_a_node_that_never_comes(shaped: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    late = "test $SLURM_NODEID = 1 && exec sleep 9; exec "
    done = shaped.srun(
        *STEP, "sh", "-c", f'{late}"$@"', "sh",
        *DOCTOR, SMALL, "--timeout=5", f"--json={file}", env=JUELICH,
    )  # fmt: skip
    found = examined(done, file, 1)
    assert found.suspects == [("HPC178", [1])]
    text = found.text("HPC178")
    assert text.startswith("jwb0002 has not come within 5 s; from here: jwb0002i")
    # The node is up: its kernel refuses. On the closed network nobody answers.
    assert "jwb0002i (10.20.0.2) is reached, and nobody listens there" in text
    assert "jwb0002 (10.10.0.2) does not answer" in text
    assert found.last_line == "--exclude=jwb0002"


def test_a_node_that_is_cut_off(shaped: Cluster, tmp_path: Path) -> None:
    """It prints itself what it sees; the others are examined."""
    file = tmp_path / "report.json"
    shaped.cut("jwb0003")
    try:
        done = shaped.srun(
            *STEP, "--label", *DOCTOR, SMALL, "--timeout=6", f"--json={file}",
            env=JUELICH,
        )  # fmt: skip
    finally:
        shaped.heal("jwb0003")
    found = examined(done, file, 1)
    assert found.suspects == [("HPC178", [2])]
    own = [line for line in lines(done.stderr) if line.startswith("2: ")]
    assert any("HPC112 no head node at jwb0001i" in line for line in own)


def test_a_node_that_hangs(shaped: Cluster, tmp_path: Path) -> None:
    """In the middle of the pairs; those without it are measured."""
    file = tmp_path / "report.json"
    command = [*DOCTOR, "--hpc-site=jsc", "--timeout=6", SMALL, f"--json={file}"]
    with step(shaped, *command) as job:
        job.says("3 pairs in")
        for number in signal.SIGSTOP, signal.SIGCONT:
            send(shaped, "jwb0003", "torchrun_hpc.doctor", number)
            if number == signal.SIGSTOP:
                job.says("jwb0003 has stopped to answer")
        assert job.end() == 1
    report = json.loads(file.read_text())
    suspects = [f for f in report["findings"] if "HPC179" in f["code"]]
    assert [f["nodes"] for f in suspects] == [[2]]
    assert "--exclude=jwb0003" in job.output
    # The node that goes on after all says what it has found.
    assert "HPC198 node 0 does not answer any more" in job.output


def test_a_worker_that_is_killed(shaped: Cluster, tmp_path: Path) -> None:
    """In torch's collectives: nobody waits for it, and no other node is named."""
    file = tmp_path / "report.json"
    with step(shaped, *DOCTOR, "--hpc-site=jsc", f"--json={file}") as job:
        job.says("torch's collectives on 3 workers")
        send(shaped, "jwb0002", "torchrun_hpc.doctor.collectives", signal.SIGKILL)
        start = time.monotonic()
        assert job.end() == 1
    assert time.monotonic() - start < 20
    findings = json.loads(file.read_text())["findings"]
    (finding,) = (f for f in findings if f["code"] == "HPC193")
    assert finding["is_suspect"]
    assert "jwb0002: worker 1 was killed by SIGKILL (9)" in finding["text"]


# --- how it is started ------------------------------------------------------------


def test_each_task_a_worker(juelich: Cluster, tmp_path: Path) -> None:
    """And with the script of the job's own line, which is not run; and a page."""
    json_file, page = tmp_path / "report.json", tmp_path / "report.html"
    done = juelich.srun(
        *("-N2", "--ntasks-per-node=2"),
        *DOCTOR, "--max-bytes=64K", f"--json={json_file}", f"--html={page}",
        "main.py", "--epochs=3", env=JUELICH,
    )  # fmt: skip
    found = examined(done, json_file, None)
    assert [node["workers"] for node in found.report["nodes"]] == [2, 2]
    assert {row["wrong"] for row in found.report["collectives"]} == {0}
    assert "on 4 workers" in done.stderr
    assert "<svg" in page.read_text()
    # The next one is compared with it.
    report = found.report
    for link in report["links"]:
        link["forward"], link["backward"] = 1e12, 1e12
    json_file.write_text(json.dumps(report))
    later = juelich.srun(
        *("-N2", "--ntasks-per-node=1"), *DOCTOR, SMALL, f"--compare={json_file}",
        *("--rdzv_backend=etcd", "--rdzv_endpoint=127.0.0.1:2379"), env=JUELICH,
    )  # fmt: skip
    assert "HPC200 compared with 2 nodes of " in later.stderr
    assert "collectives: 4 workers there and 2 workers here" in later.stderr
    assert "HPC194" in later.stdout
    assert "median bandwidth of the pairs" in later.stdout
    # The nodes meet without the job's server, and say so.
    assert "HPC199  advice   etcd at 127.0.0.1:2379 is not examined" in later.stdout


@pytest.mark.parametrize("mpi", CHOSEN, ids=str, indirect=True)
def test_with_mpirun(bare: Cluster, mpi: Launcher, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    path = ["-x", "PATH"] if mpi in OPENMPI else []
    command = [*path, *once(mpi), *DOCTOR, SMALL, f"--json={file}"]
    found = examined(run(bare, mpi, *command), file, None)
    assert found.report["hosts"] == list(NODES)
    assert len(found.report["links"]) == 3
    assert {row["wrong"] for row in found.report["collectives"]} == {0}


@pytest.mark.parametrize(
    "words",
    [
        "--nnodes=2 --rdzv_backend=c10d --rdzv_id=7 --rdzv_endpoint=n9i:1234",
        "--nnodes=2 --node_rank={node} --master_addr=10.20.0.1 --master_port=1234",
    ],
)
def test_typed_on_each_machine(bare: Cluster, words: str, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    programs = [
        bare.popen(
            [*DOCTOR, SMALL, f"--json={file}", *shlex.split(words.format(node=node))],
            host=host,
            env=ENVIRON,
        )
        for node, host in enumerate(NODES[:2])
    ]
    outputs = [program.communicate(timeout=PATIENCE) for program in programs]
    assert programs[1].returncode == 0, outputs[1]
    report = json.loads(file.read_text())
    assert report["hosts"] == list(NODES[:2])
    assert report["nodes"][1]["interface"] == "ib0"
    assert len(report["links"]) == 1


def test_who_has_no_number_is_asked_for_one(bare: Cluster) -> None:
    words = "--nnodes=3 --rdzv_backend=c10d --rdzv_id=7 --rdzv_endpoint=n9i:1234"
    done = bare.run([*DOCTOR, *words.split()], host="n10", env=ENVIRON)
    assert done.returncode == 2
    assert "HPC180 one of 3 machines" in done.stderr


def test_alone(bare: Cluster, tmp_path: Path) -> None:
    """On a laptop; a file that cannot be written is named before it takes time."""
    file, page = tmp_path / "report.json", tmp_path / "none" / "page.html"
    command = [*DOCTOR, SMALL, f"--json={file}", f"--html={page}", "--nproc_per_node=2"]
    found = examined(bare.run(command, host="n9", env=ENVIRON), file, 2)
    codes = re.findall(r"HPC\d+", found.done.stderr)
    assert codes == ["HPC197", "HPC177", "HPC197"]
    assert found.report["links"] == []
    assert len(found.report["nodes"]) == 1
    assert {row["wrong"] for row in found.report["collectives"]} == {0}


def test_wrong_use(juelich: Cluster) -> None:
    """One message, exit code 2, and nobody waits."""
    for words, code in (
        ("--max-bytes=much", "HPC010"),
        ("--nnodes=5", "HPC070"),
    ):
        done = juelich.srun("-N2", "--ntasks-per-node=1", *DOCTOR, words, env=JUELICH)
        assert done.returncode == 2, done.stderr
        (line,) = [x for x in lines(done.stderr) if "torchrun_hpc: error" in x]
        assert code in line
