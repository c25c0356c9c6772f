"""What the workers of a job are doing: asked for, and where they do not go on."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from commands import ENVIRON, FORMS, HPC, JUELICH, ROOT, SCRIPTS, lines
from pages import block, replaced
from steps import step
from waiting import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from testbed import Cluster

COMMAND = ("python", "-m", "torchrun_hpc.stacks")
STALLS = str(SCRIPTS / "stalls.py")
HEALTHY = str(SCRIPTS / "healthy.py")
LIMIT = "--hpc-stall-report=3"

# One of six workers, two on each node, waits for data, and the others for it.
TREE = (
    r"6 ranks: (.* > )?<module> stalls\.py:\d+",
    r"  5 of 6 ranks \(0-4\): step stalls\.py:\d+ > (.* > )?all_reduce \S+:\d+",
    r"\* 1 rank \(5, jwb0003\): step stalls\.py:\d+ > read stalls\.py:\d+",
)

# Where the command is started, in the job, and how.
LINE = block("docs/stacks.md", "--jobid=N").text
ASKED = {
    "on node 0": {"srun": "srun -N1 --nodelist=jwb0001"},
    "on another node": {"srun": "srun -N1 --nodelist=jwb0002"},
    "on all nodes": {},
    "for machines": {"srun": "srun -N1", ".stacks": ".stacks --json"},
}


@dataclass
class Stalled:
    """A job that has not gone on for a while, and then has.

    Attributes:
        output: What the launcher has printed, with the number of the node.
        answers: Of the command, by the names of `ASKED`.
        code: Its exit code.
        ended: The ranks that have gone on to their end.
    """

    output: str
    answers: Mapping[str, subprocess.CompletedProcess[str]]
    code: int
    ended: set[str]


def data_for(folder: Path) -> None:
    """Let the worker that waits for data have some."""
    writing = os.open(folder / "data", os.O_WRONLY | os.O_NONBLOCK)
    os.write(writing, b"data")
    os.close(writing)


@pytest.fixture(scope="module", params=FORMS)
def stalled(
    request: pytest.FixtureRequest,
    juelich: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> Stalled:
    folder = tmp_path_factory.mktemp("stalled")
    os.mkfifo(folder / "data")
    launch = (*HPC, "--hpc-site=jsc", "--nproc_per_node=2", LIMIT, STALLS, str(folder))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FORMS[request.param].items():
            patch.setitem(ENVIRON, name, value)
        with step(juelich, "--label", *launch) as job:
            job.says("HPC171")
            queue = juelich.run(["squeue", "--noheader", "--format=%A"], check=True)
            job_id = {"--jobid=N": f"--jobid={queue.stdout.strip()}"}
            asked = {name: replaced(LINE, job_id | how) for name, how in ASKED.items()}
            answers = {
                name: juelich.run(["bash", "-c", line], env=ENVIRON)
                for name, line in asked.items()
            }
            data_for(folder)
            code = job.end()
    ended = {path.suffix[1:] for path in folder.glob("ended.*")}
    return Stalled(job.output, answers, code, ended)


def assert_tree(written: list[str]) -> None:
    """See that these lines are the tree."""
    assert len(written) == len(TREE), written
    for line, expected in zip(written, TREE, strict=True):
        assert re.fullmatch(expected, line), line


def test_a_stall_is_reported_once_by_node_0(stalled: Stalled) -> None:
    """And the worker that all others wait for is the odd one."""
    report = stalled.output.partition("HPC171 ")[2].splitlines()
    assert report[0] == (
        "the 6 workers have shown the same stacks for 3 s (--hpc-stall-report); "
        "nothing is ended:"
    )
    assert all(line.startswith("0:     ") for line in report[1:4])
    assert_tree([line[len("0:     ") :] for line in report[1:4]])
    assert "0: torchrun_hpc: warning: HPC171 " in stalled.output
    assert stalled.output.count("HPC171") == stalled.output.count("rank (5") == 1


@pytest.mark.parametrize("where", [name for name in ASKED if "node" in name])
def test_who_asks_gets_the_stacks_of_all_nodes(stalled: Stalled, where: str) -> None:
    answer = stalled.answers[where]
    assert (answer.returncode, lines(answer.stderr)) == (0, [])
    first, *tree = answer.stdout.splitlines()
    assert re.fullmatch(r"launch \d+\.0", first)
    assert_tree(tree)


def test_the_same_for_machines(stalled: Stalled) -> None:
    answer = stalled.answers["for machines"]
    assert (answer.returncode, lines(answer.stderr)) == (0, [])
    (launch,) = json.loads(answer.stdout)
    assert launch["missing"] == ""
    workers = launch["workers"]
    assert [(w["rank"], w["node"], w["host"]) for w in workers] == [
        (rank, rank // 2, f"jwb000{rank // 2 + 1}") for rank in range(6)
    ]
    assert [w["problem"] for w in workers] == [""] * 6
    last = [w["frames"][-1].split()[0] for w in workers]
    assert last == ["all_reduce"] * 5 + ["read"]


def test_the_workers_run_on(stalled: Stalled) -> None:
    assert (stalled.code, stalled.ended) == (0, set("012345"))


def test_the_frames_of_the_launcher_are_not_shown(stalled: Stalled) -> None:
    """In whichever form the workers are started."""
    for answer in stalled.answers.values():
        assert "torchrun_hpc/" not in answer.stdout
    assert "torchrun_hpc/" not in stalled.output


def test_training_with_pauses_is_no_stall(
    juelich: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in FORMS["fork"].items():  # it starts sooner
        monkeypatch.setitem(ENVIRON, name, value)
    launch = (*HPC, "--hpc-site=jsc", "--nproc_per_node=2", LIMIT, HEALTHY, "8")
    with step(juelich, *launch) as job:
        assert job.end() == 0
    assert "HPC001" in job.output
    assert not re.search("HPC17[0-9]", job.output)


def test_there_is_no_launch(juelich: Cluster) -> None:
    answer = juelich.srun("-N2", *COMMAND, env=JUELICH)
    assert (answer.returncode, answer.stdout) == (1, "")
    (line,) = [line for line in lines(answer.stderr) if "torchrun_hpc: " in line]
    assert "HPC172 no launch of torchrun_hpc on jwb0001 is yours" in line


# --- as an ordinary user --------------------------------------------------------------

NOBODY = 65534  # user and group

# The interpreter may lie in a folder that only root can enter: that is empty then, but
# for what is needed.
_AS_A_USER = """
set -e
needed=$1 hidden=$2; shift 2
mount -t tmpfs -o mode=755 tmpfs /mnt
number=0
for path in $needed; do
    number=$((number + 1)); mkdir /mnt/$number; mount --bind "$path" /mnt/$number
done
for path in $hidden; do mount -t tmpfs -o mode=755 tmpfs "$path"; done
number=0
for path in $needed; do
    number=$((number + 1)); mkdir -p "$path"; mount --bind /mnt/$number "$path"
done
cd "$HOME"
exec setpriv --reuid={nobody} --regid={nobody} --clear-groups --bounding-set=-all \
    --inh-caps=-all --no-new-privs "$@"
""".replace("{nobody}", str(NOBODY))

# Starts a job, asks for its stacks until the workers are where they stay, and ends it.
_SESSION = """
mkfifo data
python -m torchrun_hpc --standalone --nproc_per_node=2 "$0" . 2> launcher &
for _ in $(seq 100); do
    python -m torchrun_hpc.stacks > stacks 2> problem
    grep -q "> read stalls.py" stacks && grep -q "> all_reduce" stacks && break
    sleep 0.2
done
cat stacks problem
grep -E "^(Uid|CapEff|CapBnd)" /proc/self/status >&2
echo data 1<> data
wait $!
echo "exit code $?"
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """Make a folder of that user, where he can get to it."""
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        yield Path(folder)


@pytest.mark.parametrize("form", FORMS)
def test_a_user_without_privileges(form: str, home: Path) -> None:
    """Who may look at processes of his own, as long as the system lets him."""
    needed = [Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), ROOT]
    closed = [
        [each for each in path.parents if not each.stat().st_mode & 1]
        for path in needed
    ]
    hidden = {folders[-1] for folders in closed if folders}
    done = subprocess.run(
        [
            # What runs there ends with the test, however that ends.
            *("unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"),
            *("sh", "-c", _AS_A_USER, "sh"),
            *(" ".join(map(str, needed)), " ".join(map(str, hidden))),
            *("sh", "-c", _SESSION, STALLS),
        ],
        env={
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONPATH": str(ROOT),
            **ENVIRON,
            **FORMS[form],
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    launcher = (home / "launcher").read_text()
    assert f"Uid:\t{NOBODY}\t{NOBODY}\t{NOBODY}" in done.stderr
    assert "CapEff:\t0000000000000000\nCapBnd:\t0000000000000000\n" in done.stderr
    *written, code = done.stdout.splitlines()
    assert code == "exit code 0", launcher
    assert len(written) == 3, done.stdout + launcher
    assert re.fullmatch(r"2 ranks: (.* > )?<module> stalls\.py:\d+", written[0])
    assert {line.partition(": ")[0] for line in written[1:]} == {
        "  1 rank (0)",
        "  1 rank (1)",
    }
    assert (home / "ended.0").stat().st_uid == NOBODY
