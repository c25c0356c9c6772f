"""Direct mode: this process becomes the worker."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest import mock

import pytest

from tests.support.juelich import COMMAND, job_at, juelich
from tests.support.plans import (
    BLOCK,
    ONE_WORKER,
    explicit,
    make_direct_plan,
    make_inputs,
    make_plan,
    mode_of,
    planned_at,
    refused,
    worker_environment,
)
from torchrun_hpc import main
from torchrun_hpc.agent import direct, start
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options.options import read
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.preflight import Preflight
from torchrun_hpc.schedulers.job import Task

PORT = "25592"  # of 19.0, as in test_plan.py


def starter(options, script, arguments=(), environ=None, rank=0):
    """Return what starts a script with these options, in a task of two nodes."""
    environ = {"PATH": "/usr/bin:/bin"} if environ is None else environ
    inputs = make_inputs(job_at(BLOCK, rank), environ=environ)
    options = read(explicit(options), (script, *arguments))
    return direct.DirectStarter(replace(inputs, options=options))


def set_up(job, hostname, environ):
    """Set up a worker, as a script does."""
    facts = Preflight(job, None, environ, hostname, COMMAND)
    with mock.patch.object(main, "preflight", return_value=facts):
        return main.setup_environment()


# --- what is run --------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 5])
def test_a_worker_does_not_become_one_once_more(rank):
    """It would run the script a second time with the rank that it has."""
    variables = planned_at(BLOCK, rank).environment.items()
    environ = {name: value.value for name, value in variables}
    text = f"worker {rank} of launch"
    refused("HPC164", text, planned_at, BLOCK, rank, environ=environ)
    others = environ | {"TORCHELASTIC_RUN_ID": "18.0"}  # of the job that ran sbatch
    assert planned_at(BLOCK, rank, environ=others)
    inputs = make_inputs(
        job_at(BLOCK, rank), environ=environ, options={"standalone": True}
    )
    assert mode_of(inputs) is Mode.ONE_NODE
    assert make_plan(inputs).meeting.nodes == 1


@pytest.mark.parametrize(
    ("options", "environ", "command"),
    [
        ({}, {}, "/usr/bin/python -u train.py --lr"),
        ({"module": True}, {}, "/usr/bin/python -u -m train.py --lr"),
        ({}, {"PYTHON_EXEC": "/other"}, "/other -u train.py --lr"),
        ({"no_python": True}, {"PYTHON_EXEC": "/other"}, "train.py --lr"),
    ],
)
def test_program(monkeypatch, options, environ, command):
    monkeypatch.setattr("sys.executable", "/usr/bin/python")
    worker = starter(options, "train.py", ("--lr",), environ)
    assert worker.command() == command.split()


@pytest.mark.parametrize(
    ("options", "script", "code"),
    [
        ({"no_python": True}, "no-such-program", "HPC016"),
        ({}, "no-such-script", "HPC150"),
        ({"module": True}, "no_such_module", None),
        ({"hpc_dry_run": "table"}, "no-such-script", None),
    ],
)
def test_program_that_is_not_there(options, script, code):
    worker, plan = starter(options, script), planned_at(BLOCK, 0)
    if code is None:
        with worker.ready(plan):
            return
    with (
        pytest.raises(LaunchError, match=f"^{script}[: ]") as caught,
        worker.ready(plan),
    ):
        pytest.fail("it is ready")
    assert caught.value.code == code


def test_a_program_that_cannot_be_run(monkeypatch, tmp_path):
    """It is found, and is none; nothing but the environment has been changed."""
    program = tmp_path / "program"
    program.write_bytes(b"\x7fELF of nothing")
    program.chmod(0o755)
    monkeypatch.setattr("os.environ", {"PATH": "/usr/bin"})
    worker = starter({"no_python": True}, str(program))
    plan = planned_at([0, 0], 1)
    text = f"{program} cannot be run: "
    refused("HPC016", text, start.start, plan, worker)


def test_whether_the_environment_is_set_up():
    environ = {"TORCHELASTIC_RUN_ID": "19.0", "RANK": "0"}
    assert direct.is_set_up(environ)
    for name in environ:
        assert not direct.is_set_up(environ | {name: ""}), name


@pytest.fixture
def environ(monkeypatch):
    """Let a test change the environment; no process is left to end an exchange."""
    environ = {"PATH": "/usr/bin", "HOME": "/root"}
    monkeypatch.setattr("os.environ", environ)
    return environ


def test_a_script_without_a_launcher_is_alone(environ):
    found = set_up(None, "laptop.home", environ)
    assert found.items() <= environ.items()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    assert [environ[name] for name in names] == ["0", "1", "0", "127.0.0.1"]
    assert re.fullmatch(r"laptop\.[0-9]+", environ["TORCHELASTIC_RUN_ID"])
    assert direct.is_set_up(environ)


def test_two_scripts_without_a_launcher_do_not_meet(environ):
    import socket  # noqa: PLC0415 - here only

    set_up(None, "laptop", environ)
    port = environ["MASTER_PORT"]
    environ.clear()
    with socket.create_server(("127.0.0.1", int(port))):
        set_up(None, "laptop", {})
    assert environ["MASTER_PORT"] != port


@pytest.mark.parametrize("rank", range(4))
def test_a_task_that_sets_itself_up(environ, rank, capsys):
    environ["PET_HPC_OMP_THREADS"] = "1"
    environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    job = replace(job_at([0] * 4, rank), launch_id=f"19.{rank}")
    found = set_up(job, "jwb0001", environ)
    assert (found["RANK"], found["WORLD_SIZE"]) == (f"{rank}", "4")
    assert found["OMP_NUM_THREADS"] == "1"
    assert "TORCHELASTIC_USE_AGENT_STORE" not in environ
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == (1 if rank == 0 else 0)


def test_a_port_that_the_user_has_set_stays(environ):
    environ["MASTER_PORT"] = "29513"
    found = set_up(None, "laptop", environ)
    assert found["MASTER_PORT"] == "29513"


def test_a_description_of_a_task(environ):
    environ["PYTHON_EXEC"] = "/usr/bin/python"
    job = job_at(BLOCK, 5)
    inputs = make_inputs(job, network=juelich(1), node=ONE_WORKER)
    worker = starter({}, "train.py", ("--lr",), environ, rank=5)
    found = worker.describe(make_direct_plan(inputs))
    assert found.command == ("/usr/bin/python", "-u", "train.py", "--lr")
    assert found.exports == worker_environment(5, BLOCK)
    assert found.meeting.backend == "direct"
    assert found.job.task == Task(5, 8, 1, 4)
