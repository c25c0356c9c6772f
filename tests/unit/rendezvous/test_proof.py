"""Who proves to belong to a launch, and who does not."""

from __future__ import annotations

import random

import hypothesis
import pytest
from hypothesis import strategies
from loopback import JOB, request_of

from torchrun_hpc import wire
from torchrun_hpc.rendezvous.proof import (
    CALLER,
    LISTENER,
    Hello,
    Secret,
    UnprovedError,
)
from torchrun_hpc.wire import WireError

OURS = Secret(JOB, b"k" * 32)
NO_KEY = Secret(JOB)
HERE = ("10.20.0.1", 20001)
ASKED = request_of(1)

# How many handshakes are tried. By hand, 100,000 were.
TRIES = 2000


def as_received(message):
    """Return what the other side reads of a message."""
    (received,) = wire.Lines(4096).feed(wire.to_line(message))
    return received


def listening(secret=OURS, address=HERE[0], port=HERE[1]):
    steps = secret.listen(address, port)
    next(steps)
    return steps


def admitted(steps, line):
    """Send the last line; return the request that was admitted."""
    with pytest.raises(StopIteration) as proved:
        steps.send(as_received(line))
    return proved.value.value


def meet(caller, listener, to=HERE):
    """Let a caller meet a listener; return the request that was admitted."""
    calls = caller.call(to, ASKED)
    answer = listener.send(as_received(next(calls)))
    return admitted(listener, calls.send(as_received(answer)))


def test_a_request_is_admitted_as_it_was_sent():
    assert meet(OURS, listening()) == ASKED
    assert meet(NO_KEY, listening(NO_KEY)) == ASKED
    assert meet(OURS, listening(address="::")) == ASKED


def test_a_vector():
    """The proof of known values stays the same."""
    secret = Secret("123456.0", bytes(range(32)))
    hello = Hello("00" * 16, ("10.20.0.1", 26058), "22" * 32)
    assert secret.proof(LISTENER, hello, "11" * 16) == (
        "6edf2b0e7214070b76106b021b53c45482d380eb51ed4e9b106634dc76bd2ec2"
    )
    assert secret.proof(CALLER, hello, "11" * 16) == (
        "c93227048e10debebc1546001378694601ddc6031b7287501d236106028bcd8c"
    )


OTHERS = {
    "another key": Secret(JOB, b"x" * 32),
    "another launch": Secret("20.0", b"k" * 32),
    "no key": NO_KEY,
}


@pytest.mark.parametrize("case", OTHERS)
def test_two_who_do_not_have_the_same_secret(case):
    other = OTHERS[case]
    for caller, listener in ((OURS, other), (other, OURS)):
        with pytest.raises(UnprovedError):
            meet(caller, listening(listener))


@pytest.mark.parametrize("case", OTHERS)
def test_a_caller_that_needs_no_proof_of_the_other_side(case):
    calls, steps = OTHERS[case].call(HERE, ASKED), listening()
    hello = next(calls)
    nonce = steps.send(as_received(hello))["nonce"]
    said = Hello(hello["nonce"], HERE, hello["request"])
    answer = {"nonce": nonce, "proof": OTHERS[case].proof(LISTENER, said, nonce)}
    with pytest.raises(WireError):
        steps.send(as_received(calls.send(answer)))


@pytest.mark.parametrize(
    "to", [("10.20.0.1", 20002), ("10.20.0.2", 20001), ("", 20001), ("10.20.0.1", 0)]
)
def test_a_caller_that_has_dialled_somebody_else(to):
    """Who listens there has passed its lines on."""
    with pytest.raises(WireError):
        meet(OURS, listening(), to)


def test_a_proof_counts_once_and_for_its_own_side():
    calls = OURS.call(HERE, ASKED)
    hello, steps = next(calls), listening()
    challenge = steps.send(as_received(hello))
    line = calls.send(as_received(challenge))
    assert admitted(steps, line) == ASKED
    again = listening()
    assert again.send(as_received(hello)) != challenge
    with pytest.raises(WireError):
        again.send(as_received(line))
    reflected = listening()
    answer = reflected.send(as_received(hello))
    with pytest.raises(WireError):
        reflected.send({**ASKED, "proof": answer["proof"]})


@pytest.mark.parametrize(
    "change", [{"rank": 2}, {"failed": {}}, {"asks": True}, {"proof": None}]
)
def test_a_request_that_somebody_has_changed(change):
    calls, steps = OURS.call(HERE, ASKED), listening()
    answer = steps.send(as_received(next(calls)))
    line = calls.send(as_received(answer))
    with pytest.raises(WireError):
        steps.send(as_received({**line, **change}))


def test_an_answer_does_not_tell_jobs_apart():
    """Nor ids, states, releases, or whether there is a key at the other side."""
    answers = []
    for launch, key in (("19.0", b"k"), ("20.0", b"k"), ("19.0", b"x")):
        steps = listening(Secret(launch, key))
        answers.append(steps.send(as_received(next(OURS.call(HERE, ASKED)))))
    forms = [{name: len(text) for name, text in each.items()} for each in answers]
    assert forms == [{"nonce": 32, "proof": 64}] * 3
    assert len({each["proof"] for each in answers}) == 3


def test_a_caller_says_nothing_of_itself_before():
    hello = next(OURS.call(HERE, ASKED))
    assert hello.keys() == {"nonce", "to", "request"}
    for value in ASKED.values():
        assert type(value) is not str or len(value) < 3 or value not in str(hello)


# --- whatever comes ------------------------------------------------------------------

TEXTS = strategies.text(max_size=64)
HELLOS = strategies.fixed_dictionaries(
    {
        "nonce": TEXTS,
        "to": strategies.just([*HERE])
        | strategies.tuples(TEXTS, strategies.integers()),
        "request": TEXTS,
    }
)
LASTS = strategies.dictionaries(strategies.just("proof") | TEXTS, TEXTS, max_size=3)
VALUES = (
    *(None, True, 0, -1, 20001, 1.5, 2**63, "", "0", "x" * 64, "\ud800", "é" * 64),
    *([], {}, [1, 2], ["10.20.0.1", 20001], {"a": 1}, [["10.20.0.1", 20001]]),
)


def mutated(draw, message, others):
    """Return a message in which something is different, or another one."""
    if draw.random() < 0.1:
        return draw.choice(others)
    name = draw.choice([*message])
    text = str(message[name])
    place = draw.randrange(len(text) + 1)
    changes = (
        *(
            text[:place] + draw.choice("0123456789abcdef") + text[place + 1 :],
            text + "0",
        ),
        *(text[:place], text.upper(), text[::-1], draw.choice(VALUES)),
    )
    changed = {**message, name: draw.choice(changes)}
    if draw.random() < 0.2:
        del changed[name]
    return changed


def examined(hello, prove):
    """Return the request that a listener admits; None if there is none.

    Args:
        hello: The first line.
        prove: Returns the last one, from the listener's answer.
    """
    steps = listening()
    try:
        answer = steps.send(prove(steps.send(hello)))
    except (WireError, UnprovedError):
        return None
    except StopIteration as proved:
        return proved.value
    raise AssertionError(answer)


def test_no_handshake_is_admitted_in_which_anything_differs():
    draw = random.Random(40)  # noqa: S311 - no secret
    calls, steps = OURS.call(HERE, ASKED), listening()
    others = [next(calls)]
    others.append(steps.send(others[0]))
    others += [calls.send(others[1]), {}, ASKED]
    same = 0
    for turn in range(TRIES):
        calls = OURS.call(HERE, ASKED)
        sent, differs = as_received(next(calls)), []

        def prove(answer, calls=calls, turn=turn, differs=differs):
            line = as_received(calls.send(answer))
            changed = mutated(draw, line, others) if turn % 2 else line
            differs.append(wire.to_line(changed) != wire.to_line(line))  # True == 1
            return changed

        hello = sent if turn % 2 else mutated(draw, sent, others)
        request = examined(hello, prove)
        is_same = hello == sent and differs == [False]
        assert request == (ASKED if is_same else None)
        same += is_same
    assert 0 < same < TRIES / 5  # what is put in was there now and then


@hypothesis.given(HELLOS, LASTS)
def test_nothing_at_random_is_admitted(first, last):
    assert examined(first, lambda _: last) is None
