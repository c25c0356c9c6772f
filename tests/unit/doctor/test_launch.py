"""What the doctor's launch is told, and what it makes of what comes back."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from doctor.reports import make_collectives, make_torch, make_worker
from nodes import THREE, explicit, step, tasks_at

from torchrun_hpc import wire
from torchrun_hpc.doctor import collectives, launch
from torchrun_hpc.doctor.launch import SCRIPT, Launch, Part
from torchrun_hpc.doctor.place import Place
from torchrun_hpc.options.options import read
from torchrun_hpc.planning.head_node import port_of
from torchrun_hpc.planning.meeting import Meeting
from torchrun_hpc.planning.mode import Mode
from torchrun_hpc.schedulers.job import Job, Task

DIRECT = next(mode for mode in Mode if mode.is_direct)
OWN = ["--max-restarts=0", "--hpc-outcome=FILE"]
OF_TWO = ["--nnodes=2", "--hpc_spares=0"]
AT = Meeting("static", nodes=3, endpoint="10.20.0.1:29500")
WHOLE = Part(0, {0: 0, 1: 1, 2: 2}, THREE, "10.20.0.1")
TWO = Part(1, {0: 0, 2: 2}, ("jwb0001", "jwb0003"), "10.20.0.1")
SECOND = Part(1, {1: 1, 2: 2}, ("jwb0002", "jwb0003"), "fd00::2")
PORT = port_of("10.20.0.1:29500 1")


def place_of(mode=Mode.SEVERAL_NODES, job=None, rank=2, asked=None, **changes):
    """Return where the last of three nodes is."""
    task, options = Task(rank, 3), ("--nproc_per_node=2",)
    here = Place(job, mode, AT, AT, task, rank, "here", options, read(asked or {}))
    return replace(here, **changes)


@pytest.mark.parametrize(
    ("mode", "job", "asked", "part", "words"),
    [
        (Mode.SEVERAL_NODES, step(2), {}, WHOLE, OWN),
        (Mode.SEVERAL_NODES, step(2), {}, TWO, [*OWN, *OF_TWO]),
        (Mode.SEVERAL_NODES, step(2), {"hpc_spares": 1}, WHOLE,
         [*OWN, "--nnodes=3", "--hpc_spares=0"]),
        (Mode.SEVERAL_NODES, step(2), {"rdzv_endpoint": "h:1", "node_rank": 2}, TWO,
         [*OWN, *OF_TWO, f"--rdzv_endpoint=10.20.0.1:{PORT}", "--node_rank=1"]),
        (Mode.SEVERAL_NODES, step(2), {"no_python": True}, WHOLE,
         [*OWN, sys.executable]),
        (Mode.SEVERAL_NODES, step(2), {"run_path": True}, WHOLE,
         [*OWN, collectives.__file__]),
        (Mode.ONE_NODE, None, {}, WHOLE, OWN),
        (DIRECT, step(2), {}, WHOLE, []),  # it has no agent
        (DIRECT, step(2), {"no_python": True}, TWO, [sys.executable]),
        # As typed on each machine: another endpoint, and other ranks.
        (Mode.MANUAL, None, {"master_addr": "h"}, WHOLE, OWN),
        (Mode.MANUAL, None, {"master_addr": "h"}, TWO,
         [*OWN, *OF_TWO, "--master_addr=10.20.0.1", f"--master_port={PORT}",
          "--node_rank=1"]),
        (Mode.MANUAL, None, {"rdzv_endpoint": "h:1"}, TWO,
         [*OWN, *OF_TWO, f"--rdzv_endpoint=10.20.0.1:{PORT}", "--node_rank=1"]),
        (Mode.MANUAL, None, {"rdzv_endpoint": "h:1"}, SECOND,
         [*OWN, *OF_TWO, f"--rdzv_endpoint=[fd00::2]:{PORT}", "--node_rank=1"]),
    ],
)  # fmt: skip
def test_its_command_line(mode, job, asked, part, words):
    here = place_of(mode, job, asked=explicit(asked))
    found = launch._words(here, part, "FILE")
    script = [] if "run_path" in asked else ["-m", SCRIPT]
    assert found == ["--nproc_per_node=2", *words, *script]


def test_messages_of_the_launcher_with_a_line_to_copy():
    """The job's own failure is in the outcome."""
    written = b"""\
torchrun_hpc: warning[HPC162]: trying again
torchrun_hpc: note[HPC114]: waiting
torchrun_hpc: error[HPC061]: without srun, this is one node. Start it with srun:
    srun --nodes=2 train.py
torchrun_hpc: error[HPC125]: the job has failed: x
"""
    text = "without srun, this is one node. Start it with srun: srun --nodes=2 train.py"
    found = launch._messages(written)
    assert found == (("HPC162", "trying again", False), ("HPC061", text, True))


def test_its_job_is_this_one():
    """The process manager has been asked already; the launch reads it as JSON."""
    job = step(2, pmi_is_open=True)
    found = launch._job_of(place_of(job=job), WHOLE)
    assert found == replace(job, pmi_is_open=False)
    assert wire.decode(Job, json.loads(json.dumps(wire.encode(found)))) == found
    assert launch._job_of(place_of(), WHOLE) is None
    assert launch._job_of(place_of(), TWO) is None


@pytest.mark.parametrize(
    ("places", "part", "rank", "expected"),
    [
        # An agent on each node.
        ([0, 1, 2], TWO, 0, (0, (0, 2, 0, 1))),
        ([0, 1, 2], TWO, 2, (1, (1, 2, 0, 1))),
        ([0, 1, 2], SECOND, 1, (0, (0, 2, 0, 1))),
        # Workers: their ranks among those of their node stay.
        ([0, 0, 1, 1, 2, 2], {0: 0, 1: 0, 4: 2, 5: 2}, 5, (1, (3, 4, 1, 2))),
        ([0, 1, 2, 0, 1, 2], {1: 1, 2: 2, 4: 1, 5: 2}, 4, (0, (2, 4, 1, 2))),
        # The first task of their node has not come.
        ([0, 0, 1, 1, 2, 2], {1: 0, 4: 2, 5: 2}, 1, (0, (0, 3, 0, 1))),
    ],
)  # fmt: skip
def test_the_job_of_a_part(places, part, rank, expected):
    if isinstance(part, dict):
        hosts = tuple(THREE[node] for node in sorted({*part.values()}))
        part = Part(1, part, hosts, "10.20.0.1")
    task = tasks_at(places)[rank]
    job = step(places[rank], task=task, head_candidates=("jwb0001",), listed_at=0)
    here = place_of(job=job, rank=places[rank], task=task)
    found = launch._job_of(here, part)
    assert (found.launch_id, found.nodes) == ("19.0.1", part.hosts)
    assert (found.node_rank, found.task) == (expected[0], Task(*expected[1]))
    assert (found.head_candidates, found.is_ranked) == ((), True)
    assert found.own_name == THREE[places[rank]]


OUTCOME = json.dumps(
    {"outcome": "script failed", "reason": "worker 3: {x}", "nodes": ["n1", "n2"]},
    indent=2,
)
FOUND = "worker 3: {x}", ("n1", "n2")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OUTCOME, FOUND),
        ("", ("", ())),
        (OUTCOME[:40], ("", ())),
        ('{"outcome": "done"}', ("", ())),
        ('{"outcome": "done", "reason": "", "nodes": null}', ("", ())),
    ],
)
def test_the_outcome(text, expected):
    assert launch._outcome(text.encode()) == expected


def test_what_the_workers_write():
    """Ranks and names of nodes are those of the job."""
    node = SimpleNamespace(_here=SimpleNamespace(node_rank=5, host="n5"))
    found, torch, worker = {}, make_torch(), make_worker(1, node=-1)
    everyone, inside = make_collectives()[0], make_collectives("node 1")[0]
    for message in (
        {"import_s": 9.5},
        {"torch": wire.encode(torch)},
        {"torch": wire.encode(replace(torch, import_s=7.0))},
        *({"at": [rank, 0, "start"]} for rank in (0, 1)),
        {"at": [1, 1, "all_reduce of 8 B"]},
        *({"row": wire.encode(row)} for row in (everyone, inside)),
        {"worker": wire.encode(worker)},
        {"worker": wire.encode(replace(worker, rank=0))},
        {"backend": "gloo"},
        {"at": "what others write"},
        {"other": 1},
    ):
        Launch._keep(node, found, json.loads(json.dumps(message)))
    assert found == {
        "torch": replace(torch, import_s=9.5),
        "at": {0: (0, "start"), 1: (1, "all_reduce of 8 B")},
        "rows": (everyone, replace(inside, scope="n5")),
        "workers": (replace(worker, node=5), replace(worker, rank=0, node=5)),
        "backend": "gloo",
    }
