"""``python -m torchrun_hpc.stacks`` on a node."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
from dataclasses import asdict
from typing import Any

import pytest

from tests.support.patience import PATIENCE, until
from tests.support.recordings import recorded
from torchrun_hpc.host.sockets import user_of
from torchrun_hpc.stacks import service
from torchrun_hpc.stacks.__main__ import main
from torchrun_hpc.stacks.sampling import WorkerStack

pytestmark = pytest.mark.usefixtures("own_names")

COMMAND = "python -m torchrun_hpc.stacks"
HOST = "n1"
NOBODY = 65534  # user


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Make an empty environment on a machine."""
    for name in os.environ:
        monkeypatch.delenv(name)
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)


@pytest.fixture
def run(capsys):
    def run(*args):
        code = main(args)
        out, err = capsys.readouterr()
        return code, out, err.splitlines()

    return run


def stack(rank, frames=(), problem="", node=0, host=""):
    sent = {**asdict(WorkerStack(rank, node, frames, problem)), "host": host}
    return json.loads(json.dumps(sent))


WAIT, READ = ("<module> a.py:1", "wait a.py:2"), ("<module> a.py:1", "read b.py:3")
ONE_NODE = {"launch": "", "missing": "", "workers": [stack(0, WAIT), stack(1, WAIT)]}
THREE_NODES = {
    "launch": "19.0",
    "missing": "jwb0003 (node 2)",
    "workers": [
        *(stack(rank, WAIT, "", 0, "jwb0001") for rank in (0, 1, 2)),
        stack(3, READ, "", 1, "jwb0002"),
        stack(4, (), "py-spy did not answer", 1, "jwb0002"),
    ],
}
OF_ONE_NODE = "2 ranks: <module> a.py:1 > wait a.py:2\n"
NO_PY_SPY = "py-spy is not installed. Run python -m pip install"
NO_STACK = {**ONE_NODE, "workers": [stack(0, (), NO_PY_SPY), stack(1, (), NO_PY_SPY)]}
NO_WORKERS = {**ONE_NODE, "workers": []}


def with_calls(*numbers):
    """Return the answer of ranks that have called the barriers up to these."""
    call = {"number": 4, "operation": "barrier", "shape": ""}
    groups = (
        [{"name": "0", "size": 2, "calls": [call | {"number": n}]}] if n else []
        for n in numbers
    )
    stacks = [stack(rank, WAIT) | {"groups": g} for rank, g in enumerate(groups)]
    return {**ONE_NODE, "workers": stacks}


# Exit code and answer.
ANSWERS: dict[str, tuple[int, dict[str, Any]]] = {
    "one node": (0, ONE_NODE),
    "three nodes": (0, THREE_NODES),
    "no stack": (1, NO_STACK),
    "no worker": (1, NO_WORKERS),
    # The network is broken, so it is unknown whether workers run.
    "no worker, and missing nodes": (1, {**NO_WORKERS, "missing": "n9, n10"}),
    "one barrier more": (0, with_calls(4, 3)),
    "equal barriers": (0, with_calls(4, 4)),
    "workers without preloading": (0, with_calls(0, 0)),
}


def test_answers(serve, run, golden):
    texts = {}
    for case, (expected, answer) in ANSWERS.items():
        agent = serve(answer["launch"], lambda found=answer: found)
        for args in (), ("--collectives",):
            code, texts[" ".join([case, *args])], err = run(*args)
            assert (code, err) == (expected, [])
        code, written, err = run("--json", "--collectives")
        assert (code, json.loads(written), err) == (expected, [answer], [])
        assert run("--json") == (code, written, err)
        agent.close()
        until(lambda: not [*service.launches()])
    golden(texts)


def test_one_answer_with_a_stack_is_enough(serve, run):
    serve("", lambda: NO_STACK)
    serve("", lambda: ONE_NODE)  # of another launch
    assert run()[0] == 0


def test_several_launches(serve, run):
    serve("19.0", lambda: THREE_NODES)
    serve("19.1", lambda: {**ONE_NODE, "launch": "19.1"})
    code, out, _ = run()
    assert code == 0
    assert out.startswith(("launch 19.0\n4 of 5 ranks", "launch 19.1\n2 ranks"))
    assert "\nno answer from jwb0003 (node 2)\n" in out
    assert f"launch 19.1\n{OF_ONE_NODE}" in out
    assert len(json.loads(run("--json")[1])) == 2


# --- of which job ---------------------------------------------------------------------


def in_a_job(monkeypatch, rank=0, **changes):
    """Be a task of three, on three nodes."""
    environ, hostname = recorded("slurm-srun-3-nodes")[rank]
    for name, value in (environ | changes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(socket, "gethostname", lambda: hostname)
    return environ["SLURM_JOB_ID"]


def test_launches_of_this_job_only(serve, run, monkeypatch):
    """One that runs on one node of it has no number of its own."""
    number = in_a_job(monkeypatch)
    serve(f"{number}.0", lambda: {**ONE_NODE, "launch": "this"})
    serve(f"{number}1.0", lambda: {**ONE_NODE, "launch": "another"})
    serve("1.0", lambda: {**ONE_NODE, "launch": "another"})
    assert run() == (0, f"launch this\n{OF_ONE_NODE}", [])
    serve("", lambda: {**ONE_NODE, "launch": "a script's own"})
    code, out, err = run()
    assert (code, err) == (0, [])
    both = f"launch this\n{OF_ONE_NODE}", f"launch a script's own\n{OF_ONE_NODE}"
    assert out in {"".join(both), "".join(both[::-1])}


def test_one_task_of_a_step_prints(serve, run, monkeypatch):
    """Here a launch without a number, as of --standalone."""
    serve("", lambda: ONE_NODE)
    printed = []
    for rank in range(3):
        in_a_job(monkeypatch, rank)
        printed.append(run())
    assert printed == [(0, OF_ONE_NODE, []), (0, "", []), (0, "", [])]


# --- what may be wrong ----------------------------------------------------------------


NO_LAUNCH = (
    1,
    "",
    [
        (
            "torchrun_hpc: error[HPC172]: no running torchrun_hpc job of yours on "
            f"{HOST}. On a cluster:"
        ),
        f"    srun --overlap --jobid=JOBID {COMMAND}",
    ],
)


def test_no_launch(run):
    assert run() == NO_LAUNCH
    assert run("--json")[:2] == (1, "")


@pytest.fixture
def broken(own_names):
    """Let an agent take questions, and never answer."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{own_names}/{os.getuid()}/19.0/1")
        listening.listen()
        yield listening


NO_ANSWER = "torchrun_hpc: error[HPC173]: the agent did not answer: "


@pytest.mark.usefixtures("broken")
def test_an_agent_that_does_not_answer(run, monkeypatch, serve):
    """Another one does."""
    (name,) = [name for _, name in service.launches()]
    ask = service.ask
    monkeypatch.setattr(
        service, "ask", lambda of, _: ask(of, 0.02 if of == name else PATIENCE)
    )
    assert run() == (1, "", [f"{NO_ANSWER}timed out"])
    serve("", lambda: ONE_NODE)
    code, out, err = run("--json")
    assert (code, json.loads(out), err) == (1, [ONE_NODE], [f"{NO_ANSWER}timed out"])


def test_a_name_that_takes_no_more_callers(run, broken):
    """No agent's does: another user has taken it, who cannot be asked."""
    broken.listen(0)
    with contextlib.ExitStack() as opened:
        callers = [
            opened.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(9)
        ]
        for caller in callers:
            caller.settimeout(0)
        took = [caller.connect_ex(broken.getsockname()) for caller in callers]
        assert took[-1] == errno.EAGAIN
        assert run() == NO_LAUNCH


@pytest.mark.parametrize("launch", ["", "19.0"])
def test_a_name_that_another_user_has_taken(run, serve, monkeypatch, launch):
    """Not a word of it, whether there is a launch of this user or not."""
    alone = run()
    serve(launch, lambda: ONE_NODE)
    (others,) = [name for _, name in service.launches()]
    monkeypatch.setattr(
        service,
        "user_of",
        lambda asking: (
            NOBODY if asking.getpeername() == others.encode() else user_of(asking)
        ),
    )
    assert run() == alone
    serve("", lambda: ONE_NODE)
    assert run() == (0, OF_ONE_NODE, [])


def test_an_agent_that_has_just_ended(run, monkeypatch, broken):
    found = [*service.launches()]
    broken.close()
    monkeypatch.setattr(service, "launches", lambda: found)
    assert run() == (1, "", [f"{NO_ANSWER}Connection refused"])


def test_a_job_that_cannot_be_found_out(serve, run, monkeypatch):
    """It needs no job to look at what is on this node."""
    monkeypatch.setenv("SLURM_JOB_ID", "19")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NODELIST", "n[1-")
    serve("", lambda: ONE_NODE)
    assert run() == (0, OF_ONE_NODE, [])
