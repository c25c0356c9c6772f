"""The doctor, on real links that have a rate, and with real faults."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.support.cluster import links
from tests.support.cluster.commands import (
    ENVIRON,
    HOSTS,
    JUELICH,
    NODES,
    SCRIPTS,
    lines,
    on_node,
)
from tests.support.cluster.examinations import (
    DOCTOR,
    MBITS,
    PRELOADED,
    SMALL,
    STEP,
    examine_as_on_page,
    examined,
)
from tests.support.cluster.mpi import OPENMPI_4, once, run, type_on_each
from tests.support.cluster.real_job import RealJob, kill
from tests.support.doctor_reports import make_report
from tests.support.patience import NEVER_S
from torchrun_hpc import wire

HALF = MBITS // 2
HANGS = str(SCRIPTS / "hangs.py")
COLLECTIVES = "torchrun_hpc.doctor.collectives"


@pytest.fixture(scope="module")
def shaped(juelich):
    """Links with a rate."""
    with links.shaped(juelich, MBITS):
        yield juelich


@pytest.fixture
def no_torch(tmp_path):
    """Return variables with which torch cannot be imported: the rest is examined."""
    folder = tmp_path / "no_torch"
    folder.mkdir()
    (folder / "torch.py").write_text("raise ImportError('libcudart.so: not found')")
    return JUELICH | {"PYTHONPATH": str(folder)}


def besides_torch(found):
    """Return what is suspect, but for what follows from `no_torch`."""
    return [each for each in found.suspects if each[0] != "HPC018"]


@pytest.fixture
def examine(shaped, tmp_path):
    """Examine three nodes, and expect exit code 1; `before` precedes the command."""

    def examine(*before, options=(), step=STEP, env=PRELOADED):
        file = tmp_path / "report.json"
        command = [*before, *DOCTOR, SMALL, *options, f"--json={file}"]
        return examined(shaped.srun(*step, *command, env=env), file, 1)

    return examine


# --- links ------------------------------------------------------------------------


LINKS = {
    "losses": (
        lambda cluster: links.lossy(cluster, "jwb0001"),
        *("HPC191", [0], r"jwb0001, with 2 of 2 nodes: .*% of the segments are sent"),
    ),
    "5 ms more": (
        lambda cluster: links.delayed(cluster, "jwb0001"),
        *("HPC191", [0]),
        r"jwb0001, with 2 of 2 nodes: .*\b([5-9]|\d\d)\.\d ms for a round trip",
    ),
    "an MTU that does not fit": (
        lambda cluster: links.small_mtu(cluster, "jwb0002"),
        *("HPC189", [1], r"jwb0002, with 2 of 2 nodes: packets of 9000 bytes"),
    ),
    "a firewall": (
        lambda cluster: links.firewalled(cluster, "jwb0002", "jwb0003"),
        *("HPC190", [], "jwb0002 cannot connect to jwb0003: no answer"),
    ),
}


def test_a_link_with_half_the_rate(shaped, no_torch, tmp_path):
    """Of what it sends. The command is the page's."""
    words, small = "doctor --nproc", {"=gpu": f"=1 {SMALL} --json=file"}
    with links.throttled(shaped, "jwb0002", HALF, egress_only=True):
        done = examine_as_on_page(shaped, tmp_path, words, small, env=no_torch)
    found = examined(done, tmp_path / "file", 1)
    assert besides_torch(found) == [("HPC191", [1])]
    text = r"jwb0002, with 2 of 2 nodes: 4\d Mbit/s \(usual here: 9\d Mbit/s"
    assert re.search(text, found.text("HPC191")), found.text("HPC191")
    assert found.verdict[1:] == ["    --exclude=jwb0002"]


def test_a_slow_node_on_uneven_links(shaped, examine, no_torch):
    """The others are as fast as a busy machine has time for, each pair differently."""
    with (
        links.shaped(shaped, 40_000),
        links.throttled(shaped, "jwb0002", HALF, egress_only=True),
    ):
        found = examine(env=no_torch)
    assert besides_torch(found) == [("HPC191", [1])]
    text = r"jwb0002, with 2 of 2 nodes: 4\d Mbit/s \(usual here: \d+\.\d+ Gbit/s\)"
    assert re.search(text, found.text("HPC191")), found.text("HPC191")


@pytest.mark.parametrize("fault", LINKS)
def test_a_bad_link(shaped, examine, fault, no_torch):
    caused, code, nodes, text = LINKS[fault]
    with caused(shaped):
        found = examine(env=no_torch)
    assert besides_torch(found) == [(code, nodes)]
    assert re.search(text, found.text(code)), found.text(code)
    if nodes:
        assert found.verdict[1:] == [f"    --exclude={shaped.names[nodes[0]]}"]
    else:
        assert "--exclude" not in found.done.stdout


# --- nodes ------------------------------------------------------------------------

# Each on a node of its own, in one examination: commands before the doctor's.
SPOILED = {
    0: "exec faketime -f +60s",
    1: "mount -t tmpfs -o size=1m tmpfs {small}; export TMPDIR={small}; "
    "dd if=/dev/zero of={small}/all 2> /dev/null; "
    "export MKL_CBWR=COMPATIBLE; exec",
    2: "mount --bind {folder}/version.py {version}; "
    "mount --bind {folder}/hosts /etc/hosts; exec",
}


def test_bad_nodes(shaped, examine, tmp_path):
    """A clock, a full disk, other instructions, another torch, a wrong hosts file."""
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
    spoiled = "".join(
        f'test $SLURM_NODEID = {rank} && {{ {how.format(**names)} "$@"; }}; '
        for rank, how in SPOILED.items()
    )
    found = examine("unshare", "--mount", "sh", "-c", spoiled, "sh")
    assert sorted(found.suspects) == [
        ("HPC181", [2]), ("HPC182", [2]), ("HPC183", [0]), ("HPC184", [1]),
        ("HPC243", []), ("HPC243", [1]),  # two products differ, which may both be wrong
    ]  # fmt: skip
    assert "other workers on the same kind of device" in found.text("HPC243")
    assert "GFLOP/s at best (median: " in found.text("HPC243")
    assert "torch: 2.12.0 on jwb0003; 2.13.0+cpu on 2 others" in found.text("HPC181")
    assert "jwb0003i resolves to 10.20.0.33" in found.text("HPC182")
    assert re.search(r"clock of jwb0001 is (59|60)\.\d s ahead", found.text("HPC183"))
    assert str(small) in found.text("HPC184")


def test_a_torch_that_cannot_be_imported(examine, tmp_path):
    """Not even on node 0: all are examined all the same, and torch runs elsewhere.

    So are they where a launch would be refused, because of a variable on one node.
    """
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: not found')")
    broken = f"test $SLURM_NODEID = 0 && export PYTHONPATH={tmp_path}; "
    broken += "test $SLURM_NODEID = 1 && export PET_NNODES=2; exec "
    found = examine("sh", "-c", f'{broken}"$@"', "sh")
    assert sorted(found.suspects) == [("HPC018", [0]), ("HPC070", [])]
    assert found.text("HPC070").startswith("on jwb0002: PET_NNODES=2, but ")
    assert "libcudart.so: not found" in found.text("HPC018")
    assert [each["node"] for each in found.report["workers"]] == [2]
    assert len(found.report["links"]) == 3


# --- nodes that do not take part --------------------------------------------------


def test_a_node_that_never_comes(examine, no_torch):
    only_two = "sh", "-c", 'test $SLURM_NODEID = 1 || exec "$@"', "sh"
    found = examine(*only_two, options=["--timeout=15"], env=no_torch)
    assert besides_torch(found) == [("HPC178", [1])]
    text = found.text("HPC178")
    assert text.startswith("jwb0002 did not join within 15 s. Node 0 sees: jwb0002i")
    # The node is up: its kernel refuses. On the closed network nobody answers.
    assert "jwb0002i (10.20.0.2) is reached, and nobody listens there" in text
    assert "jwb0002 (10.10.0.2) does not answer" in text
    assert found.verdict[1:] == ["    --exclude=jwb0002"]


def test_a_node_that_is_cut_off(shaped, examine, no_torch):
    """It prints itself what it sees; the others are examined."""
    labelled = "--label", *STEP
    shaped.cut("jwb0003")
    try:
        found = examine(options=["--timeout=15"], step=labelled, env=no_torch)
    finally:
        shaped.heal("jwb0003")
    assert besides_torch(found) == [("HPC178", [2])]
    assert [f["first"] for f in found.report["links"]] == [0]
    own = [line for line in lines(found.done.stderr) if line[:3] == "2: "]
    assert any("HPC112]: no head node at jwb0001i" in line for line in own), own


def test_a_node_that_hangs(shaped, no_torch, tmp_path):
    """In the middle of the pairs; those without it are measured."""
    file = tmp_path / "report.json"
    hangs = on_node(2, f'shift 3; set -- python {HANGS} "$@"')
    with RealJob(
        shaped,
        *("--timeout=15", SMALL, f"--json={file}"),
        program=DOCTOR,
        script=(),
        nodes=3,
        first=f'{hangs}; set -- nice -n-40 "$@"',
        environ=no_torch,
    ) as job:
        # A node that continues before node 0 has ended may still learn of the end.
        job.says("task 0: Exited with exit code 1")
        assert "jwb0003 stopped responding" in job.output
        (hanging,) = job.programs(HANGS, 2)
        hanging.resume()
        job.ends(1)
    report = json.loads(file.read_text())
    suspects = [f for f in report["findings"] if "HPC179" in f["code"]]
    assert [f["nodes"] for f in suspects] == [[2]]
    assert "--exclude=jwb0003" in job.output
    # The node that continues after all says what it saw.
    assert "HPC198]: node 0 stopped answering" in job.output


def test_a_worker_that_is_killed(shaped, tmp_path):
    """In torch's collectives: the others are measured once more without its node."""
    file = tmp_path / "report.json"
    options = (f"--timeout={NEVER_S}", f"--json={file}")
    with RealJob(shaped, *options, program=DOCTOR, script=(), environ=JUELICH) as job:
        job.says("launching 2 workers")
        job.wait(lambda: job.programs(COLLECTIVES, 1))
        kill(job.programs(COLLECTIVES, 1))
        job.says("launching 1 worker:")
        job.ends(1)
    report = json.loads(file.read_text())
    (finding,) = (f for f in report["findings"] if f["code"] == "HPC193")
    assert (finding["is_suspect"], finding["nodes"]) == (True, [1])
    assert "worker 1 on jwb0002 (node 1) was killed by SIGKILL (9)" in finding["text"]
    assert [(each["rank"], each["node"]) for each in report["workers"]] == [(0, 0)]
    assert "--exclude=jwb0002" in job.output


# --- how it is started ------------------------------------------------------------


def test_each_task_a_worker(juelich, tmp_path):
    """And with the script of the job's own line, which is not run; and all files."""
    json_file, page = tmp_path / "report.json", tmp_path / "report.html"
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(wire.encode(make_report(2))))  # on faster links
    done = juelich.srun(
        *("-N2", "-n3", "--distribution=block"),
        *DOCTOR, SMALL, f"--json={json_file}", f"--html={page}",
        f"--compare={earlier}", "main.py", "--epochs=3", env=JUELICH,
    )  # fmt: skip
    found = examined(done, json_file, None)
    assert [node["workers"] for node in found.report["nodes"]] == [2, 1]
    assert {row["wrong"] for row in found.report["collectives"]} == {0}
    assert "launching 3 workers" in done.stderr
    assert page.read_text().count("<i style=") == 2
    assert "HPC200]: compared with 2 nodes of " in done.stderr
    assert "8 workers of nccl then, and 3 workers of gloo now" in done.stderr
    assert "median bandwidth of the pairs" in found.text("HPC194")


@pytest.mark.parametrize("mpi", [OPENMPI_4], ids=str, indirect=True)
def test_with_mpirun(bare, mpi, no_torch, tmp_path):
    """Its launch is not refused: it gets as far as the import of torch."""
    file = tmp_path / "report.json"
    forwarded = "-x", "PATH", "-x", f"PYTHONPATH={no_torch['PYTHONPATH']}"
    command = [*forwarded, *once(mpi, 2), *DOCTOR, SMALL, f"--json={file}"]
    found = examined(run(bare, mpi, *command, hosts=HOSTS), file, 1)
    assert found.report["hosts"] == list(HOSTS)
    assert len(found.report["links"]) == 1
    refusals = {code for code, _ in found.suspects} - {"HPC191"}  # links are noise
    assert refusals == {"HPC018"}


@pytest.mark.parametrize(
    "words",
    [
        "--nnodes=2 --rdzv_backend=c10d --rdzv_id=7 --rdzv_endpoint=n9i:1234",
        "--nnodes=2 --node_rank=0 --master_addr=10.20.0.1 --master_port=1234",
    ],
)
def test_typed_on_each_machine(bare, words, no_torch, tmp_path):
    file = tmp_path / "report.json"
    line = f"{' '.join(DOCTOR)} {SMALL} --json={file} {words}"
    environ = ENVIRON | {"PYTHONPATH": no_torch["PYTHONPATH"]}
    type_on_each(bare, line, codes=(1, 0), env=environ)
    report = json.loads(file.read_text())
    assert report["hosts"] == list(NODES[:2])
    assert report["nodes"][1]["interface"] == "ib0"
    assert len(report["links"]) == 1


def test_who_has_no_number_is_asked_for_one(bare):
    words = "--nnodes=3 --rdzv_backend=c10d --rdzv_id=7 --rdzv_endpoint=n9i:1234"
    done = bare.run([*DOCTOR, *words.split()], host="n10", env=ENVIRON)
    assert done.returncode == 2, done.stderr
    assert "HPC180]: this is one of 3 machines" in done.stderr


def test_alone(bare, tmp_path):
    """On a laptop; a file that cannot be written is named before it takes time.

    A function of torch's runs the script.
    """
    file, page = tmp_path / "report.json", tmp_path / "none" / "page.html"
    files = f"--json={file}", f"--html={page}"
    command = [*DOCTOR, SMALL, *files, "--run-path", "--", "main.py"]
    found = examined(bare.run(command, host="n9", env=ENVIRON), file, 2)
    codes = re.findall(r"HPC\d+", "".join(lines(found.done.stderr)))
    assert codes == ["HPC197", "HPC177", "HPC197"]
    assert found.report["links"] == []
    assert len(found.report["nodes"]) == 1
    assert [worker["rank"] for worker in found.report["workers"]] == [0]


def test_wrong_use(juelich):
    """One message, exit code 2, and nobody waits."""
    step = "-N2", "--ntasks-per-node=1"
    done = juelich.srun(*step, *DOCTOR, "--nnodes=5", env=JUELICH)
    assert done.returncode == 2, done.stderr
    (line,) = [x for x in lines(done.stderr) if "torchrun_hpc: error" in x]
    assert "HPC070" in line
