"""How a job has ended, in a file."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import (
    ChildFailedError,
    ProcessFailure,
)

from tests.support.plans import PLAN
from tests.support.simulated_job import worker_failure
from torchrun_hpc.agent import end
from torchrun_hpc.agent.end import together
from torchrun_hpc.agent.signals import DeathSignals
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.failures import report
from torchrun_hpc.failures.failure import Failure, Kind
from torchrun_hpc.failures.report import LocalWorld
from torchrun_hpc.failures.worker import Worker
from torchrun_hpc.options.options import Options
from torchrun_hpc.planning.meeting import Meeting, Spares

HOSTS = ("jwb0001", "jwb0002", "jwb0003", "jwb0004")


MEETING = Meeting(
    "c10d",
    nodes=4,
    spares=Spares(1),
    endpoint="jwb0001i:25592",
    hosts=HOSTS,
    coordinator=0,
    launch_id="19.0",
)


def plan(file="", meeting=MEETING, *, dry_run=""):
    asked = Options(hpc_outcome=str(file), hpc_dry_run=dry_run)
    return replace(PLAN, asked=asked, meeting=meeting)


SECOND = replace(MEETING, node_rank=1, report_rank=1)
LATER = replace(MEETING, launch_id="20.0")


def end_launch(plan, error=None):
    """End a launch that torch's own rendezvous serves."""
    local = LocalWorld(plan.meeting, lambda failure: (failure, ()))
    with together(plan, local, DeathSignals(), is_command=False):
        if error:
            raise error


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
        "takeovers": 0,
        "preload": "none",
        "by": "",
    }
    return values | changes


# --- what it says -------------------------------------------------------------------

# How a job has failed, what that is called, and the nodes that it is about.
FAILURES = [
    (worker_failure(5, code=-9), "script failed", ["jwb0002"]),
    (Failure(Kind.SIGNAL, (1,), code=15), "stopped", ["jwb0002"]),
    (Failure(Kind.AGENT, (1,), text="No space left"), "launcher failed", ["jwb0002"]),
    (Failure(Kind.REFUSED, (9,), text="another one"), "launcher failed", []),
    (Failure(Kind.LOST, (3, 1)), "nodes failed", ["jwb0002", "jwb0004"]),
    (Failure(Kind.SILENT, (1,), code=120), "nodes failed", ["jwb0002"]),
    (Failure(Kind.MISSING, (1,), code=900), "nodes failed", ["jwb0002"]),
    (Failure(Kind.EXCLUDED, (1,), text="no GPU"), "nodes failed", ["jwb0002"]),
    (Failure(Kind.COORDINATOR), "nodes failed", []),
]


@pytest.mark.parametrize(("failure", "kind", "nodes"), FAILURES)
def test_an_outcome(failure, kind, nodes):
    reason = report.sentence(failure, plan().meeting)
    assert reason
    of_a_worker = {"rank": 5, "code": -9} if failure.kind is Kind.WORKER else {}
    by = "jwb0001" if failure.kind is Kind.COORDINATOR else ""
    found = expected(kind, reason, nodes, by=by, **of_a_worker)
    assert end.outcome_of(failure, plan()) == found


def test_every_kind_of_failure_has_an_outcome():
    assert {failure.kind for failure, *_ in FAILURES} == set(Kind)


@pytest.mark.parametrize(
    ("failure", "exclude"),
    [
        (None, ["jwb0003", "jwb0004"]),
        (worker_failure(5, code=3), ["jwb0003", "jwb0004"]),
        (Failure(Kind.SIGNAL, (0,), code=15), ["jwb0003", "jwb0004"]),
        (Failure(Kind.LOST, (1, 3)), ["jwb0002", "jwb0003", "jwb0004"]),
    ],
)
def test_nodes_that_were_lost_before_are_to_be_excluded(failure, exclude):
    found = end.outcome_of(failure, plan(), (3, 2), 2, 1)
    assert found["exclude"] == exclude
    assert (found["restarts"], found["takeovers"]) == (2, 1)


def test_nodes_without_a_name_are_left_out():
    known = plan(meeting=replace(MEETING, hosts=("", "jwb0002", "", "")))
    found = end.outcome_of(Failure(Kind.LOST, (0, 1)), known, (3,))
    assert (found["nodes"], found["exclude"]) == (["jwb0002"], ["jwb0002"])


# --- how it is written --------------------------------------------------------------


DONE = expected("done")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "outcome.json"


def read(file):
    return json.loads(file.read_text(encoding="utf-8"))


def test_the_first_one_of_a_launch_is_written(file, capsys):
    """Another node was cut off, and comes back after the end."""
    end.write_outcome(DONE, plan(file))
    end.write_outcome(expected("nodes failed"), plan(file))
    assert read(file) == DONE
    assert file.read_text(encoding="utf-8").endswith("}\n")
    later = expected("nodes failed", launch_id="20.0")
    end.write_outcome(later, plan(file, LATER))
    assert read(file) == later
    assert [*file.parent.iterdir()] == [file]
    assert capsys.readouterr().err == ""


OLD, NEW = expected("nodes failed"), expected("nodes failed", takeovers=1)
ALONE = expected("nodes failed", by="jwb0002 (node 1)")


@pytest.mark.parametrize(
    ("first", "second", "last"),
    [
        (OLD, NEW, NEW),  # the old coordinator was cut off
        (NEW, OLD, NEW),
        (ALONE, OLD, OLD),
        (OLD, ALONE, OLD),
        (NEW, ALONE, NEW),
        (ALONE, {**ALONE, "by": "jwb0003 (node 2)"}, ALONE),
        ({**NEW, "takeovers": "many"}, NEW, NEW),
    ],
)
def test_the_last_coordinator_has_the_last_word(first, second, last, file):
    end.write_outcome(first, plan(file))
    end.write_outcome(second, plan(file))
    assert read(file) == last


NO_OUTCOMES = {
    "that it runs": json.dumps(expected("running")),
    "empty": "",
    "not JSON": "{",
    "a list": "[]",
    "a number": "3",
    "another form": '{"launch_id": 19}',
    "deep": '{"launch_id": ' + "[" * 100_000,
    "deep and closed": "[" * 100_000 + "]" * 100_000,
    "a long number": "1" * 10_000,
    "not UTF-8": "\udcff",
    "large": json.dumps(DONE) + " " * 2**23,
}


@pytest.mark.parametrize("text", NO_OUTCOMES.values(), ids=NO_OUTCOMES)
def test_what_is_no_outcome_is_replaced(text, file):
    file.write_bytes(os.fsencode(text))
    end.write_outcome(DONE, plan(file))
    assert read(file) == DONE


def link(file, victim):
    file.symlink_to(victim)


def link_to_an_outcome_of_this_launch(file, victim):
    victim.write_text(json.dumps(DONE))
    file.symlink_to(victim)


def names_that_were_predictable(file, victim):
    for pid in range(os.getpid() - 500, os.getpid() + 500):
        file.with_name(f".{file.name}.{pid}").symlink_to(victim)


# What another user puts into a folder in which both may write.
PLANTED = [
    lambda file, _: os.mkfifo(file),
    lambda file, victim: file.hardlink_to(victim),
    link,
    link_to_an_outcome_of_this_launch,
    names_that_were_predictable,
]


@pytest.mark.parametrize("plant", PLANTED)
def test_what_others_plant_leads_nowhere_else(plant, file, tmp_path_factory, capsys):
    victim = tmp_path_factory.mktemp("home") / ".bashrc"
    victim.write_text("what must stay")
    plant(file, victim)
    before, planted = victim.read_text(), {*file.parent.iterdir()}
    end.write_outcome(DONE, plan(file))
    assert read(file) == DONE
    assert not file.is_symlink()
    assert victim.read_text() == before
    assert {*file.parent.iterdir()} == planted | {file}
    assert capsys.readouterr().err == ""


REASONS = [
    "$(echo run)",
    "`echo run`",
    "$HOME ${HOME}",
    "\\$(echo run)",
    '"$(echo run)"',
]


@pytest.mark.parametrize("reason", REASONS)
def test_a_shell_that_sources_it_runs_nothing_of_it(reason, file):
    """The reason may be text of another program: between quotes these two count."""
    found = expected("launcher failed", reason)
    end.write_outcome(found, plan(file))
    assert read(file) == found
    assert not {"$", "`"} & {*file.read_text(encoding="utf-8")}


def test_none_is_written_unless_it_is_wanted_and_by_the_first_node(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    end.write_outcome(DONE, plan())
    end_launch(plan(file, SECOND))
    assert [*file.parent.iterdir()] == []


def test_the_file_is_always_whole(file, monkeypatch):
    """Another program may read it at any time."""
    end.write_outcome(DONE, plan(file))
    seen = []

    def look(new, target):
        seen.append((read(new)["outcome"], read(target)["outcome"], new.parent))
        new.rename(target)

    monkeypatch.setattr(Path, "replace", look)
    later = expected("stopped", launch_id="20.0")
    end.write_outcome(later, plan(file, LATER))
    assert seen == [("stopped", "done", file.parent)]
    assert read(file) == later


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("there/outcome.json", "No such file or directory\n"),
        ("file/outcome.json", "Not a directory\n"),
        ("folder", "Is a directory\n"),
        (".", ""),
        ("..", ""),
        ("/", ""),
    ],
)
def test_where_it_cannot_be_written(name, problem, tmp_path, capsys, monkeypatch):
    (tmp_path / "work" / "folder").mkdir(parents=True)
    (tmp_path / "work" / "file").touch()
    monkeypatch.chdir(tmp_path / "work")
    before = sorted(tmp_path.rglob("*"))
    end.write_outcome(DONE, plan(name))
    assert capsys.readouterr().err.startswith(
        f"torchrun_hpc: error[HPC215]: cannot write the outcome to {name}: {problem}"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_is_full(file, capsys, monkeypatch):
    end.write_outcome(DONE, plan(file))

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    later = expected("stopped", launch_id="20.0")
    end.write_outcome(later, plan(file, LATER))
    assert f"to {file}: No space left on device\n" in capsys.readouterr().err
    assert [*file.parent.iterdir()] == [file]
    assert read(file) == DONE


# --- that of an earlier launch ------------------------------------------------------


@pytest.mark.parametrize(("meeting", "is_there"), [(MEETING, False), (SECOND, True)])
def test_the_outcome_of_an_earlier_launch_is_removed_once(meeting, is_there, file):
    file.touch()
    end.forget_outcome(plan(file, meeting))
    assert file.exists() is is_there


def test_a_dry_run_removes_nothing(file):
    file.touch()
    end.forget_outcome(plan(file, dry_run="text"))
    assert file.exists()


def test_there_is_no_earlier_launch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for file in (tmp_path / "outcome.json", tmp_path, "outcome.json", ""):
        end.forget_outcome(plan(file))
    assert tmp_path.is_dir()
    assert capsys.readouterr().err == ""


def test_a_folder_that_does_not_exist(tmp_path):
    """It is reported at the start, by the first node."""
    for folder in (tmp_path / "a", Path("/dev/null")):
        end.forget_outcome(plan(folder / "b", SECOND))
        with pytest.raises(LaunchError) as caught:
            end.forget_outcome(plan(folder / "b"))
        assert f"{caught.value.code} {caught.value}" == (
            f"HPC234 --hpc-outcome={folder / 'b'}: the folder {folder} "
            "does not exist. Create it where all nodes see it"
        )


# --- that it runs -------------------------------------------------------------------


def worker(node):
    return Worker(5, 8, node, 1, 4711, lambda: None)


def test_a_launch_that_runs(file):
    """Its first node writes it; what is final is not written over."""
    end.write_running(plan(file), [worker(1)])
    assert not file.exists()
    for kind in ("done", "stopped"):
        end.write_running(plan(file), [worker(0)])
        assert read(file) == expected("running" if kind == "done" else "done")
        end.write_outcome(expected(kind), plan(file))
        assert read(file) == DONE
    end.write_running(plan(file, LATER), [worker(0)])
    assert read(file) == expected("running", launch_id="20.0")


def test_a_launch_that_runs_writes_nothing_to_a_file_of_the_system(capfd):
    end.write_running(plan("/dev/stdout"), [worker(0)])
    assert capfd.readouterr() == ("", "")


# --- where there is no scheduler rendezvous -----------------------------------------


def child_failed(**values):
    failure = ProcessFailure(1, 4711, values["exitcode"], "<N/A>")
    return ChildFailedError("train.py", {values["rank"]: failure})


HEAD = "jwb0001 (node 0)"
AGENT = f"the agent on {HEAD}"
KILLED = "was killed by SIGKILL (9): probably out of memory"
ENDS = [
    (None, "done", ""),
    (
        child_failed(rank=5, exitcode=-9),
        "script failed",
        f"worker 5 on {HEAD} {KILLED}",
    ),
    (
        SignalException("SIGTERM", signal.SIGTERM),
        "stopped",
        f"{AGENT} received SIGTERM (15)",
    ),
    (
        LaunchError("HPC132", "port 4711 is taken"),
        "launcher failed",
        f"{AGENT} gave up: HPC132 port 4711 is taken",
    ),
    (
        RuntimeError("can't start new thread"),
        "launcher failed",
        f"{AGENT} gave up: RuntimeError can't start new thread",
    ),
]


@pytest.mark.parametrize(("error", "kind", "reason"), ENDS)
def test_how_a_launch_ends_on_one_node(error, kind, reason, file):
    of_a_worker = {"rank": 5, "code": -9} if kind == "script failed" else {}
    found = expected(kind, reason, ["jwb0001"] if error else [], **of_a_worker)
    alone = plan(file, replace(MEETING, nodes=1, spares=Spares(), hosts=HOSTS[:1]))
    with pytest.raises(type(error)) if error else nullcontext():
        end_launch(alone, error)
    assert read(file) == found
