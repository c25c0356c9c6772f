"""Questions to all agents, such as what their workers are doing."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulated_job import (
    KILLED,
    SimulatedJob,
    each_wrong,
    to,
    welcome,
)
from torchrun_hpc import wire
from torchrun_hpc.rendezvous.protocol import FROM_AGENT, Question, QuestionOver, Reply
from torchrun_hpc.wire import WireError

SAMPLES = [{"rank": 9, "node": 2, "frames": ["f a.py:1"], "problem": ""}]


def ask(number=7):
    """Return a question of an agent to all."""
    return Question(number, "stacks", ["about it"])


def asked_by(rank, number=7):
    """Return the question as it is passed on."""
    return Question(number, "stacks", ["about it"], rank)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_all_agents_are_asked(rank):
    """The one that asks is one of them. It gets all replies to its question."""
    job = SimulatedJob().at_work()
    assert job.send(rank, ask()) == to(range(3), asked_by(rank))
    job.send((rank + 1) % 3, ask())
    for other in (2, 0, 1):
        sent = job.send(other, Reply(rank, 7, SAMPLES))
        assert sent == {rank: [Reply(rank, 7, SAMPLES, other)]}


NO_NUMBERS: list[Any] = [None, True, "", "7", [], {}, [7], 7.5, 7.0]
NO_NAMES: list[Any] = [None, "x" * 1000, [1], {"a": 1}, 1.5, True]
WRONG_MESSAGES = [
    {name: wire.encode(message) | change}
    for name, message, values in (
        ("question", ask(), {"number": NO_NUMBERS, "what": NO_NAMES}),
        ("reply", Reply(0, 7, SAMPLES), {"asker": NO_NUMBERS, "number": NO_NUMBERS}),
    )
    for change in each_wrong(values)
]


@pytest.mark.parametrize("message", WRONG_MESSAGES)
def test_only_numbers_and_names_are_passed_on(message):
    """The receiver of anything else would end its connection."""
    job = SimulatedJob().at_work()
    with pytest.raises(WireError):
        job.send_line(1, message)
    assert job.sent() == {}
    assert job.failure is None


def test_a_reply_to_an_agent_that_is_gone():
    job = SimulatedJob(max_restarts=1).at_work()
    job.send(1, ask())
    job.lose(1)
    assert job.send(2, Reply(1, 7, [])) == {}
    job.connect(1, connection="again", agent="second")
    assert job.send(0, ask(8))["again"] == [asked_by(0, 8)]


def test_who_asks_hears_of_an_agent_that_goes():
    """It will not reply. A second agent of its rank is asked again."""
    job = SimulatedJob(max_restarts=1).at_work()
    job.send(1, ask())
    gone = Reply(1, 7, None, 2)
    assert job.lose(2)[1][0] == gone
    assert asked_by(1) in job.connect(2, connection="again", agent="second")["again"]


@pytest.mark.parametrize("is_lost", [False, True])
def test_an_agent_that_reconnects_gets_no_question_twice(is_lost):
    """It still replies to the first one."""
    job = SimulatedJob(max_restarts=1).at_work()
    job.send(1, ask())
    if is_lost:  # otherwise it connects before the end of the first connection arrives
        job.lose(2)
    assert asked_by(1) not in job.connect(2, connection="again")["again"]
    sent = job.send("again", Reply(1, 7, SAMPLES))
    assert sent == {1: [Reply(1, 7, SAMPLES, 2)]}


def test_an_agent_that_comes_later_is_also_asked():
    job = SimulatedJob()
    job.connect(0)
    job.send(0, ask())
    assert job.connect(1) == {1: [welcome(), asked_by(0)]}
    job.send(0, QuestionOver(7))
    assert job.connect(2) == {2: [welcome()]}


def test_an_agent_asks_several_questions_at_once():
    """The end of one does not end the others."""
    job = SimulatedJob(max_restarts=1)
    job.connect(0)
    for number in (7, 8, 9):
        job.send(0, ask(number))
    job.send(0, QuestionOver(8))
    assert job.connect(1) == {1: [welcome(), asked_by(0, 7), asked_by(0, 9)]}
    assert job.lose(1)[0] == [Reply(0, number, None, 1) for number in (7, 9)]
    job.lose(0)
    sent = job.connect(0, connection="again", agent="second")
    assert sent == {"again": [welcome()]}


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_stacks_may_be_asked_for_at_any_time(failures):
    """While the job waits, while it restarts, and when it has failed."""
    job = SimulatedJob(max_restarts=1).all_connected()
    for number in range(failures):
        job.join(0, 1, 2)
        job.died(KILLED, number)
    assert job.send(2, ask()) == to(range(3), asked_by(2))
    assert job.send(0, Reply(2, 7, []))[2][0].number == 7


@pytest.mark.parametrize("asker", [3, -1, 10**19])
def test_a_reply_for_nobody(asker):
    job = SimulatedJob().at_work()
    assert job.send(2, Reply(asker, 7, SAMPLES)) == {}
    assert job.failure is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
    ),
)


@given(st.sampled_from([ask(), Reply(0, 7, [])]), json_values, st.data())
def test_whatever_is_asked_or_replied(message, value, data):
    job = SimulatedJob().at_work()
    ((name, sent),) = wire.encode(message, FROM_AGENT).items()
    changes = {data.draw(st.sampled_from([*sent])): value, "content": value}
    with suppress(WireError):
        job.send_line(1, {name: sent | changes})
    assert job.is_running
