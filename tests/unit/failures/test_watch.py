"""Workers fail, and the watch says which was the first."""

from __future__ import annotations

import functools
import json
import signal
from dataclasses import replace

import pytest

from tests.support.patience import NEVER_S
from tests.support.raised import CAUSE, RAISED
from torchrun_hpc import limits
from torchrun_hpc.failures.watch import Attempt, Watch
from torchrun_hpc.failures.worker import Worker

FOLLOWS = RAISED.replace(CAUSE, "RuntimeError: Connection closed by peer")
LEFT = 2  # restarts


class Watched:
    """Workers of node 1, and what the watch has found out about them."""

    def __init__(self, children):
        self._children = children
        self.failures = []
        self.attempts = []
        self.sample = lambda: None  # in a hang
        self.others_hang = False
        self.watch = Watch(
            children.relay,
            on_failure=self._add,
            on_hang=self._sample,
            hangs=lambda: self.others_hang,
        )

    def _sample(self):
        self.sample()

    def _add(self, failure, attempt):
        self.failures.append(failure)
        self.attempts.append(attempt)

    def start(self, number):
        """Start so many workers; return them."""
        found = [self._children.start() for _ in range(number)]
        self.begin(found)
        return found

    def begin(self, children):
        workers = [
            Worker(
                rank=4 + local,
                size=8,
                node=1,
                local_rank=local,
                pid=child.pid,
                exit_code=functools.partial(getattr, child, "code"),
            )
            for local, child in enumerate(children)
        ]
        self.watch.begin(workers, LEFT)

    def later(self, seconds=1.0):
        """Let everything written be read; then time passes."""
        for child in self._children.started:
            self._children.end_of(child)
        self._children.now += seconds

    def ranks(self):
        return [failure.rank for failure in self.failures]


@pytest.fixture
def watched(children, monkeypatch):
    monkeypatch.setattr(limits, "WATCH_PAUSE", NEVER_S)  # the tests look themselves
    found = Watched(children)
    yield found
    found.watch.end()


def test_a_failure_is_found_once(watched):
    good, bad, _ = watched.start(3)
    good.end(0)
    bad.end(1, RAISED)
    watched.watch.check()
    watched.watch.check()
    (failure,) = watched.failures
    assert (failure.rank, failure.text) == (5, CAUSE)
    runs = [(worker.rank, runs) for worker, runs in watched.watch.workers]
    assert runs == [(4, False), (5, False), (6, True)]
    (following,) = watched.start(1)
    following.end(3)
    watched.watch.check()
    assert [(f.rank, f.code, f.text) for f in watched.failures[1:]] == [(4, 3, "")]
    assert watched.attempts == [Attempt(1, LEFT), Attempt(2, LEFT)]


def test_the_first_one_is_the_one_from_which_others_follow(watched):
    first, cause, last = watched.start(3)
    first.end(1, FOLLOWS)
    watched.later()
    cause.end(1, RAISED)
    last.end(1, FOLLOWS)
    watched.watch.check()
    assert watched.ranks()[0] == 5
    assert sorted(watched.ranks()) == [4, 5, 6]


def test_the_first_one_is_the_one_that_said_so_first(watched):
    """Whichever took longer to end."""
    quick, slow = watched.start(2)
    slow.write(RAISED)
    watched.later()
    quick.end(1, RAISED)
    watched.later()
    slow.end(1)
    watched.watch.check()
    assert watched.ranks() == [5, 4]


def test_those_that_are_stopped_have_not_failed(watched):
    first, bad, last = watched.start(3)
    bad.end(1, RAISED)
    first.end(-signal.SIGTERM)
    watched.watch.check()
    last.end(-signal.SIGTERM)
    watched.watch.check()
    assert watched.ranks() == [5]


def test_whatever_one_does_that_is_stopped(watched):
    """DataLoader, for one, raises that its worker was terminated."""
    ways = [(143, ""), (1, ""), (1, RAISED), (1, "step 17"), (-signal.SIGABRT, "")]
    bad, *others = watched.start(1 + len(ways))
    bad.end(1, RAISED)
    watched.watch.before_poll()
    watched.later()
    for child, end in zip(others, ways, strict=True):
        child.end(*end)
    watched.watch.stopping(look=True)
    watched.watch.all_stopped()
    assert watched.ranks() == [4]


def test_what_fails_after_torch_has_looked(watched):
    raises, killed = watched.start(2)
    watched.watch.before_poll()
    watched.watch.poll_was_clean()
    watched.later()
    raises.end(1, RAISED)
    killed.end(-signal.SIGKILL)
    watched.watch.check()
    assert sorted(watched.ranks()) == [4, 5]


@pytest.mark.parametrize("text", ["", RAISED + "\n"])
def test_one_that_is_terminated_by_others_has_failed(watched, text):
    """Whoever sent the signal: it is not the agent."""
    _, terminated = watched.start(2)
    terminated.write(text)
    watched.later()
    terminated.end(-signal.SIGTERM)
    watched.watch.check()
    assert [(f.rank, f.code) for f in watched.failures] == [(5, -signal.SIGTERM)]


def told(seconds):
    """Return what a fork has told, whose stderr is not read."""
    return lambda *_: json.dumps({"error": RAISED, "time": seconds}).encode()


@pytest.mark.parametrize("others_fail", [True, False])
def test_one_that_has_told_its_end_and_is_stopped(watched, unread, others_fail):
    """Torch stops it while it runs its exit handlers."""
    victim, cause, last = watched.start(3)
    workers = [worker for worker, _ in watched.watch.workers]
    workers[1] = replace(workers[1], told=told(unread.now))
    watched.watch.begin(workers, LEFT)
    unread.now += 1
    if others_fail:
        victim.end(1)
    watched.watch.before_poll()
    watched.watch.stopping(look=True)
    unread.now += 1
    for child in (cause, last):
        child.end(-signal.SIGTERM)
    watched.watch.all_stopped()
    failures = watched.failures
    assert watched.ranks() == ([4, 5] if others_fail else [5])
    assert (failures[-1].text, failures[-1].code) == (CAUSE, 1)
    assert [failure.is_doubtful for failure in failures[:-1]] == [True] * others_fail


def test_the_end_of_workers_in_a_restart_is_no_failure(watched):
    terminated, raises = watched.start(2)
    watched.watch.stopping(look=True)
    watched.later()
    terminated.end(-signal.SIGTERM)
    raises.end(1, RAISED)
    watched.watch.check()
    assert watched.failures == []


@pytest.mark.parametrize("looks", [0, 1])
def test_a_last_look(watched, looks):
    """The agent still sees what failed together with the first worker."""
    raises, follows = watched.start(2)
    raises.end(1, RAISED)
    follows.write(FOLLOWS)
    watched.later()
    watched.watch.stopping(look=True)
    follows.end(1)
    for _ in range(looks):
        watched.watch.check()
    watched.watch.all_stopped()
    watched.watch.check()
    assert sorted(watched.ranks()) == [4, 5]


def test_no_last_look(watched):
    """A signal ends all of them."""
    (raises,) = watched.start(1)
    raises.end(1, RAISED)
    watched.watch.stopping(look=False)
    watched.watch.check()
    assert watched.failures == []


def test_one_that_fails_before_all_are_started(watched, children):
    bad, good = children.start(), children.start()
    bad.end(1, RAISED)
    watched.later()
    watched.begin([bad, good])
    watched.watch.check()
    assert watched.failures[0].text == CAUSE


def test_equal_failures_of_a_node_have_their_lines_once(watched):
    for child, cause in zip(
        watched.start(3), (CAUSE, CAUSE, "KeyError: 1"), strict=True
    ):
        child.end(1, RAISED.replace(CAUSE, cause))
    watched.watch.check()
    assert sorted(bool(failure.worker.lines) for failure in watched.failures) == [
        0,
        1,
        1,
    ]


@pytest.mark.parametrize(("seconds", "codes"), [(1, [1]), (4.9, [1]), (6, [])])
def test_one_that_is_about_to_end_is_not_forgotten(watched, seconds, codes):
    """Its peers may have failed of it, and ended, before."""
    raises, sleeps = watched.start(2)
    raises.write(RAISED + "\n")
    watched.later(seconds)
    watched.watch.stopping(look=True)
    watched.later()
    for child in (raises, sleeps):
        child.end(-signal.SIGTERM)
    watched.watch.all_stopped()
    assert watched.ranks() == [4] * len(codes)
    # Whatever shortened its end.
    assert [failure.code for failure in watched.failures] == codes
    assert {failure.text for failure in watched.failures} <= {CAUSE}


# --- a hang ---------------------------------------------------------------------------

HANG = RAISED.replace(CAUSE, "RuntimeError: Timed out waiting 9ms for recv operation")


@pytest.fixture
def sampled(watched):
    """Note which workers run, and which have failed, when they are sampled."""
    found = []

    def sample():
        running = [worker.rank for worker, runs in watched.watch.workers if runs]
        found.append((running, [*watched.watch.failures]))

    watched.sample = sample
    return found


def test_workers_are_sampled_before_they_are_stopped(watched, sampled):
    late, *_ = watched.start(3)
    watched.watch.before_poll()
    late.end(1, HANG)  # after our look, before torch's
    watched.watch.before_stop()
    assert sampled == [([5, 6], [4])]


def test_those_that_fail_while_others_are_sampled_failed_by_themselves(watched):
    late, other = watched.start(2)
    late.end(1, HANG)
    watched.watch.before_poll()
    watched.sample = lambda: (watched.later(), other.end(1, HANG))
    watched.watch.before_stop()
    assert watched.ranks() == [4, 5]


def test_no_other_failure_is_delayed(watched, sampled):
    for code, text in (1, RAISED), (-9, b""), (1, RAISED.replace(CAUSE, "Timeout")):
        bad, _ = watched.start(2)
        bad.end(code, text)
        watched.watch.before_poll()
        watched.watch.before_stop()
        watched.watch.all_stopped()
    assert sampled == []


def test_what_follows_from_an_ordinary_failure_is_no_hang(watched, sampled):
    bad, neighbour, _ = watched.start(3)
    bad.end(1, RAISED)
    neighbour.end(1, HANG)
    watched.watch.before_stop()
    assert sampled == []


def test_a_hang_on_another_node(watched, sampled):
    watched.start(2)
    watched.others_hang = True
    watched.watch.stopping(look=False)  # a signal
    watched.watch.before_stop()
    assert sampled == []
    watched.start(2)
    watched.watch.stopping(look=True)
    watched.watch.before_stop()
    assert sampled == [([4, 5], [])]
