"""What a task of the doctor replies to the questions of task 0."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from torchrun_hpc import wire
from torchrun_hpc.doctor.conductor import END, LAUNCH, MEASURE, PEERS, SHOW, Shown, Turn
from torchrun_hpc.doctor.examination import Examinee
from torchrun_hpc.doctor.launch import LaunchPart
from torchrun_hpc.doctor.link import Peer
from torchrun_hpc.doctor.results import Link
from torchrun_hpc.schedulers.job import Task

if TYPE_CHECKING:
    from torchrun_hpc.doctor import link as links
    from torchrun_hpc.doctor.place import Place

PEERS_OF_ALL = [Peer(rank, f"10.20.0.{rank}", 4000 + rank, 1500) for rank in range(4)]


class Links:
    """It knows what it was told to measure."""

    def measure(self, *asked):
        self.asked = asked
        return Link(1, 3, forward=5.0)


@pytest.fixture
def examinee():
    """Return the first task of two on node 1, which has links."""
    place = SimpleNamespace(task=Task(2, 8, 0, 2), node_rank=1)
    made = Examinee(cast("Place", place))
    made._links = cast("links.Links", Links())
    return made


def ask(examinee, what, about):
    return examinee.replies[what.name](wire.encode(about))


def meet(examinee):
    examinee.replies[PEERS.name]([wire.encode(peer) for peer in PEERS_OF_ALL])


def test_it_measures_with_its_partner(examinee):
    meet(examinee)
    partners = {1: 3, 3: 1, 0: 2, 2: 0}
    half = ask(examinee, MEASURE, Turn("0/0", partners))
    assert wire.decode(Link, half) == Link(1, 3, forward=5.0)
    own, other = PEERS_OF_ALL[1], PEERS_OF_ALL[3]
    assert examinee._links.asked == (own, other, "0/0")


def test_what_it_takes_no_part_in(examinee):
    meet(examinee)
    assert ask(examinee, MEASURE, Turn("0/0", {0: 2, 2: 0})) is None
    part = LaunchPart(1, {0: 0, 4: 2}, ("n0", "n2"), "10.20.0.0")
    assert ask(examinee, LAUNCH, part) is None
    examinee._links = None
    assert ask(examinee, MEASURE, Turn("0/0", {1: 3, 3: 1})) is None


@pytest.mark.parametrize(("missing", "was_late"), [([], False), ([0, 2], True)])
def test_it_knows_at_the_end_whether_it_came_in_time(missing, was_late, examinee):
    examinee.replies[END](missing)
    assert (examinee.ended.is_set(), examinee.was_late) == (True, was_late)


def test_the_second_task_of_a_node_shows_where_it_is(examinee):
    examinee.place.task = Task(3, 8, 1, 2)
    assert examinee.replies[SHOW.name](None) == wire.encode(Shown(1))
