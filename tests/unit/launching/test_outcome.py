"""How a job has ended, in a file."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from plans import make_launch_plan
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.launching import outcome
from torchrun_hpc.rendezvous.protocol import Failure, Kind

HOSTS = ("jwb0001", "jwb0002", "jwb0003", "jwb0004")


def plan(file="", node_rank=0, **changes):
    values = {
        "nodes": 4,
        "spares": 1,
        "node_rank": node_rank,
        "workers": 4,
        "report_rank": node_rank,
        "endpoint": "jwb0001i:25592",
        "hosts": HOSTS,
        "coordinator": 0,
        "launch_id": "19.0",
        "outcome": str(file),
    }
    return make_launch_plan(**values | changes)


def expected(kind, reason="", nodes=(), **changes):
    values = {
        "outcome": kind,
        "launch_id": "19.0",
        "reason": reason,
        "rank": None,
        "code": None,
        "nodes": [*nodes],
        "exclude": [*nodes] if kind == "nodes failed" else [],
        "restarts": 0,
    }
    return values | changes


# --- what it says -------------------------------------------------------------------

NODE = "jwb0002 (node 1)"
HEAD = "jwb0001 (node 0)"
KILLED = "was killed by SIGKILL (9): probably out of memory"

# A failure, how the job ended, why, on which nodes; rank and code of a worker.
FAILURES = {
    "a worker": (
        Failure(Kind.WORKER, (1,), 5, 3, "ValueError: bad"),
        "script failed",
        f"worker 5 on {NODE} ended with exit code 3: ValueError: bad",
        ["jwb0002"],
    ),
    "a worker that was killed": (
        Failure(Kind.WORKER, (1,), 5, -9),
        *("script failed", f"worker 5 on {NODE} {KILLED}", ["jwb0002"]),
    ),
    "a signal": (
        Failure(Kind.SIGNAL, (1,), code=15),
        *("stopped", f"the agent on {NODE} received SIGTERM (15)", ["jwb0002"]),
    ),
    "an agent": (
        Failure(Kind.AGENT, (1,), text="No space left on device: /tmp"),
        "launcher failed",
        f"the agent on {NODE} gave up: No space left on device: /tmp",
        ["jwb0002"],
    ),
    "an agent that does not belong here": (
        Failure(Kind.REFUSED, (9,), text="another torchrun_hpc"),
        "launcher failed",
        "the agent on node 9 does not belong here (another torchrun_hpc); see there",
        [],
    ),
    "two nodes that are lost": (
        Failure(Kind.LOST, (3, 1)),
        "nodes failed",
        (
            f"the agents on jwb0004 (node 3), {NODE} are gone without a word: they "
            "were killed, or the nodes are lost"
        ),
        ["jwb0002", "jwb0004"],
    ),
    "a node that is silent": (
        Failure(Kind.SILENT, (1,), code=120),
        *("nodes failed", f"the agent on {NODE} did not answer for 120 s", ["jwb0002"]),
    ),
    "a node that is missing": (
        Failure(Kind.MISSING, (1,), code=900),
        "nodes failed",
        f"1 node did not come within 900 s (join_timeout): {NODE}",
        ["jwb0002"],
    ),
    "a node that is out": (
        Failure(Kind.UNFIT, (1,), text="its health check ended with exit code 1"),
        "nodes failed",
        f"{NODE} is out: its health check ended with exit code 1",
        ["jwb0002"],
    ),
    "the coordinator": (
        Failure(Kind.COORDINATOR),
        *("nodes failed", f"the agent on the head node, {HEAD}, is gone", []),
    ),
}


@pytest.mark.parametrize("case", FAILURES)
def test_an_outcome(case):
    failure, kind, reason, nodes = FAILURES[case]
    of_a_worker = {}
    if failure.kind is Kind.WORKER:
        of_a_worker = {"rank": 5, "code": failure.code}
    found = expected(kind, reason, nodes, **of_a_worker)
    assert outcome.outcome_of(failure, plan()) == found


def test_all_went_well():
    assert outcome.outcome_of(None, plan()) == expected("done")


def test_every_kind_of_failure_has_an_outcome():
    assert {failure.kind for failure, *_ in FAILURES.values()} == set(Kind)


@pytest.mark.parametrize(
    ("failure", "exclude"),
    [
        (None, ["jwb0003", "jwb0004"]),
        (Failure(Kind.WORKER, (1,), 5, 3), ["jwb0003", "jwb0004"]),
        (Failure(Kind.SIGNAL, (0,), code=15), ["jwb0003", "jwb0004"]),
        (Failure(Kind.LOST, (1, 3)), ["jwb0002", "jwb0003", "jwb0004"]),
    ],
)
def test_nodes_that_were_lost_before_are_to_be_excluded(failure, exclude):
    found = outcome.outcome_of(failure, plan(), (3, 2), 2)
    assert (found["exclude"], found["restarts"]) == (exclude, 2)


def test_nodes_without_a_name_are_left_out():
    known = plan(hosts=("", "jwb0002", "", ""))
    found = outcome.outcome_of(Failure(Kind.LOST, (0, 1)), known, (3,))
    assert (found["nodes"], found["exclude"]) == (["jwb0002"], ["jwb0002"])


# --- how it is written --------------------------------------------------------------


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def test_it_is_written(tmp_path, capsys):
    file = tmp_path / "outcome.json"
    outcome.write(expected("done"), plan(file))
    assert read(file) == expected("done")
    assert file.read_text(encoding="utf-8").endswith("}\n")
    assert [*tmp_path.iterdir()] == [file]
    assert capsys.readouterr().err == ""


def test_the_first_one_of_a_launch_counts(tmp_path):
    """Another node was cut off, and comes back after the end."""
    file = tmp_path / "outcome.json"
    outcome.write(expected("done"), plan(file))
    outcome.write(expected("nodes failed"), plan(file))
    assert read(file) == expected("done")
    later = expected("nodes failed", launch_id="20.0")
    outcome.write(later, plan(file, launch_id="20.0"))
    assert read(file) == later


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"launch_id": 19}'])
def test_what_is_no_outcome_is_replaced(text, tmp_path):
    file = tmp_path / "outcome.json"
    file.write_text(text)
    outcome.write(expected("done"), plan(file))
    assert read(file) == expected("done")


def test_it_is_written_where_the_launch_began(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome.write(expected("done"), plan("outcome.json"))
    assert read(tmp_path / "outcome.json") == expected("done")


def test_it_is_not_wanted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome.write(expected("done"), plan())
    assert [*tmp_path.iterdir()] == []


def test_the_file_is_always_whole(tmp_path, monkeypatch):
    """Another program may read it at any time."""
    file = tmp_path / "outcome.json"
    outcome.write(expected("done"), plan(file))
    seen = []

    def look(new, target):
        seen.append((read(new)["outcome"], read(target)["outcome"], new.parent))
        new.rename(target)

    monkeypatch.setattr(Path, "replace", look)
    later = expected("stopped", launch_id="20.0")
    outcome.write(later, plan(file, launch_id="20.0"))
    assert seen == [("stopped", "done", tmp_path)]
    assert read(file) == later


def not_there(folder):
    return folder / "there" / "outcome.json", "No such file or directory"


def below_a_file(folder):
    (folder / "file").touch()
    return folder / "file" / "outcome.json", "Not a directory"


def a_folder(folder):
    (folder / "outcome.json").mkdir()
    return folder / "outcome.json", "Is a directory"


@pytest.mark.parametrize("place", [not_there, below_a_file, a_folder])
def test_where_it_cannot_be_written(place, tmp_path, capsys):
    file, problem = place(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    outcome.write(expected("done"), plan(file))
    assert capsys.readouterr().err == (
        f"torchrun_hpc: error: HPC215 the outcome cannot be written to {file}: "
        f"{problem}\n"
    )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("file", [".", "..", "/"])
def test_what_has_no_name_of_a_file(file, tmp_path, capsys, monkeypatch):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    outcome.write(expected("done"), plan(file))
    assert f"error: HPC215 the outcome cannot be written to {file}: " in (
        capsys.readouterr().err
    )
    assert [*tmp_path.rglob("*")] == [tmp_path / "work"]


def test_a_disk_that_is_full(tmp_path, capsys, monkeypatch):
    file = tmp_path / "outcome.json"
    outcome.write(expected("done"), plan(file))

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    outcome.write(expected("stopped"), plan(file, launch_id="20.0"))
    assert f"to {file}: No space left on device\n" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [file]
    assert read(file) == expected("done")


# --- that of an earlier launch ------------------------------------------------------


@pytest.mark.parametrize(("node_rank", "is_there"), [(0, False), (1, True)])
def test_the_outcome_of_an_earlier_launch_is_removed_once(
    node_rank, is_there, tmp_path
):
    file = tmp_path / "outcome.json"
    file.touch()
    outcome.forget(plan(file, node_rank))
    assert file.exists() is is_there


def test_there_is_no_earlier_launch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in (tmp_path / "outcome.json", tmp_path, tmp_path / "a" / "b", ""):
        outcome.forget(plan(file))
    assert tmp_path.is_dir()
    assert capsys.readouterr().err == ""


# --- where there is no scheduler rendezvous -----------------------------------------


def child_failed(**values):
    failure = ProcessFailure(1, 4711, values["exitcode"], "<N/A>")
    return ChildFailedError("train.py", {values["rank"]: failure})


AGENT = f"the agent on {HEAD}"
ENDS = {
    "well": (None, "done", ""),
    "by a worker": (
        child_failed(rank=5, exitcode=-9),
        *("script failed", f"worker 5 on {HEAD} {KILLED}"),
    ),
    "by a signal": (
        SignalException("SIGTERM", signal.SIGTERM),
        *("stopped", f"{AGENT} received SIGTERM (15)"),
    ),
    "by the launcher": (
        LaunchError("HPC132", "port 4711 is taken"),
        *("launcher failed", f"{AGENT} gave up: port 4711 is taken"),
    ),
    "by Python": (
        RuntimeError("can't start new thread"),
        *("launcher failed", f"{AGENT} gave up: can't start new thread"),
    ),
}


@pytest.mark.parametrize("case", ENDS)
def test_how_a_launch_ends_on_one_node(case, tmp_path):
    error, kind, reason = ENDS[case]
    of_a_worker = {"rank": 5, "code": -9} if case == "by a worker" else {}
    found = expected(kind, reason, ["jwb0001"] if error else [], **of_a_worker)
    file = tmp_path / "outcome.json"
    alone = plan(file, nodes=1, spares=0, hosts=HOSTS[:1])
    if error is None:
        with outcome.recorded(alone):
            pass
    else:
        with pytest.raises(type(error)), outcome.recorded(alone):
            raise error
    assert read(file) == found


def test_only_the_first_node_writes_it(tmp_path):
    with outcome.recorded(plan(tmp_path / "outcome.json", 1)):
        pass
    assert [*tmp_path.iterdir()] == []
