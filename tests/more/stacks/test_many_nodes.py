"""The stacks of a job of 64 nodes, each with a worker, within seconds."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from functools import partial

import pytest

from tests.support.loopback import (
    LoopbackClient,
    LoopbackJob,
    started,
    take_part,
    together,
)
from tests.support.patience import PATIENCE
from torchrun_hpc.agent.elastic import ask_for_stacks
from torchrun_hpc.failures.worker import Worker
from torchrun_hpc.rendezvous.client import Listener
from torchrun_hpc.rendezvous.protocol import Reply
from torchrun_hpc.stacks import collectives, sampling
from torchrun_hpc.stacks.inspection import STACKS
from torchrun_hpc.stacks.sampling import received

NODES = 64
PROGRAM = """\
import sys, time
def reduce(): time.sleep(600)
def read(): time.sleep(600)
print(flush=True)
read() if sys.argv[1] == "37" else reduce()
"""


@pytest.fixture
def workers(processes):
    """Start a small Python for each node; return their process numbers."""
    argv = sys.executable, "-I", "-S", "-c", PROGRAM
    return [processes.start(*argv, str(node)) for node in range(NODES)]


@pytest.fixture
def agents(workers):
    """Connect the agents, which answer as in rendezvous/connection.py."""

    def answer(node, question):
        worker = Worker(node, NODES, node, 0, workers[node], lambda: None)
        stacks = sampling.sample([worker], PATIENCE)
        content = [asdict(stack) for stack in stacks]
        clients[node].send(Reply(question.asker, question.number, content))

    def listener(node):
        def answer_aside(question):
            started(partial(answer, node, question))

        return Listener(reply=answer_aside)

    with closing(LoopbackJob()) as job, ThreadPoolExecutor(NODES) as pool:
        job.start_server(nodes=NODES)
        clients = [
            job.client(node, nodes=NODES, listener=listener(node))
            for node in range(NODES)
        ]
        list(pool.map(LoopbackClient.connect, clients))
        list(pool.map(take_part, clients))
        yield clients
        list(pool.map(LoopbackClient.leave, clients))


def test_all_answer(agents, processes):
    for asking in (0, NODES - 1):
        ask = partial(ask_for_stacks, agents[asking], STACKS, PATIENCE)
        (answers,) = together(ask)
        assert sorted(answers) == [*range(NODES)]
        stacks = [s for node in answers for s in received(answers[node])]
        hosts = {node: f"n{node}" for node in range(NODES)}
        lines = collectives.render(sorted(stacks, key=lambda stack: stack.rank), hosts)
        assert lines == [
            "64 ranks: <module> <string>:5",
            "  63 of 64 ranks (0-36,38-63): reduce <string>:2",
            "* 1 rank (37, n37): read <string>:3",
        ]
    assert all(program.is_running for program in processes.all)
