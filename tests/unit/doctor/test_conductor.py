"""What task 0 asks, and for how long it waits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from tests.support.doctor_reports import make_interface, make_node
from torchrun_hpc import limits, waiting, wire
from torchrun_hpc.doctor import conductor
from torchrun_hpc.doctor.conductor import LAUNCH
from torchrun_hpc.doctor.launch import LaunchEnd
from torchrun_hpc.doctor.link import MOST_BYTES, Peer
from torchrun_hpc.doctor.place import Wishes
from torchrun_hpc.rendezvous.client import JobState
from torchrun_hpc.schedulers.job import Task

if TYPE_CHECKING:
    from torchrun_hpc.doctor.place import Place


def client_with(ask_all):
    """Return a client whose job continues."""
    return SimpleNamespace(ask_all=ask_all, state=JobState())


def test_a_node_has_time_to_wait_for_the_other_one(monkeypatch):
    """Or it would be taken for one that hangs, with a short limit of the user's."""
    waits = []
    monkeypatch.setattr(waiting, "until", lambda *args: waits.append(args[1]))
    place = SimpleNamespace(task=Task(0, 2), wishes=Wishes(timeout=10))
    zero = conductor.Conductor(cast("Place", place), print)
    zero._first = {0: 0, 1: 1}
    zero._client = client_with(lambda _, wait, __: wait(dict) or {})
    assert [*zero._measured("0/0", [(0, 1)])] == []
    wait_for_partner = limits.LINK_OPEN_TIMEOUT + limits.PARTNER_TIMEOUT
    assert waits[0] > wait_for_partner + limits.LINK_MESSAGE_TIMEOUT
    assert zero._records.hung == dict.fromkeys((0, 1), "during the measurements")


@pytest.mark.parametrize(
    ("code", "asked", "waits"),
    [
        (1, ["launch", "stop"], [220, 20, 20]),
        (0, ["launch"], [220]),
        (None, ["launch", "stop"], [220, 20, 20]),  # its doctor has gone
    ],
)
def test_a_launch_that_fails_on_a_task_is_ended_elsewhere(
    monkeypatch, code, asked, waits
):
    """Here the other task replies nothing, as if its doctor had been killed."""
    seen, waited, found = [], [], {} if code is None else {0: LaunchEnd(code)}
    replies = {0: wire.encode(found.get(0))}

    def until(condition, limit, *_):
        waited.append(limit)
        return condition()

    def ask_all(what, wait, *_):
        seen.append(what)
        wait(lambda: replies if what == LAUNCH.name else {})
        return replies

    monkeypatch.setattr(waiting, "until", until)
    place = SimpleNamespace(task=Task(0, 2), wishes=Wishes())
    zero = conductor.Conductor(cast("Place", place), print)
    zero._client = client_with(ask_all)
    assert zero._ask(LAUNCH, None, [0, 1], 220) == found
    assert (seen, waited) == (asked, waits)


# --- what task 0 knows of a node ------------------------------------------------------

SLOW = make_interface("ib0", "10.20.0.1", mtu=9000, speed_mbit=1000)
NEXT = make_interface("eth0", "10.10.0.1", "fd00::1")


@pytest.mark.parametrize(
    ("changes", "speed", "sent", "moved"),
    [
        ({"interfaces": (SLOW, NEXT)}, 1.25e8, 0.15 * 1.25e8, 25 * 10**6 + 100 * 2**16),
        ({"interfaces": (replace(SLOW, speed_mbit=0),)}, float("inf"), MOST_BYTES,
         1700 * 2**16),
        ({"interface": ""}, float("inf"), MOST_BYTES, 1700 * 2**16),
        ({"interfaces": ()}, float("inf"), MOST_BYTES, 1700 * 2**16),
    ],
)  # fmt: skip
def test_how_much_is_sent(changes, speed, sent, moved):
    """Of 64, 16, 4 and 1 times 2**16 bytes: two times, and up to 20 times."""
    node, nodes = make_node(**changes), [make_node(1), make_node(**changes)]
    assert (conductor._speed(node), conductor._expected(node)) == (speed, sent)
    found = conductor._expected_of_collectives(2**22, nodes)
    assert found == 6 * (moved + 170 * 2**16)


@pytest.mark.parametrize(
    ("interfaces", "mtu"),
    [((SLOW, NEXT), 9000), ((replace(SLOW, name="ib1"), NEXT), 1500), ((), 1500)],
)
def test_what_the_others_know(interfaces, mtu):
    found = conductor._peer(make_node(interfaces=interfaces))
    assert found == Peer(0, "10.20.0.1", 40000, mtu)
