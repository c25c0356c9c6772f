"""Whom a member follows, when its coordinator is lost: without clock or network.

All know the order of the members. Each asks them in this order; the first one that
answers coordinates. A member is that one itself if all before it are gone, or silent.
Where a network falls apart, there may be several. Those that have too few members look
around, and give way to one that has enough, or comes before them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrun_hpc.rendezvous.protocol import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


@dataclass(frozen=True)
class Answer:
    """What a member answers to the question who coordinates.

    Attributes:
        is_gone: Whether its process has ended: nobody listens there any more.
        follows: The coordinator that it is connected to; ``None`` without one.
        coordinates: Whether it is one.
        is_strong: Whether it has enough members.
    """

    is_gone: bool = False
    follows: int | None = None
    coordinates: bool = False
    is_strong: bool = False


def answer_of(message: Mapping[str, Any]) -> Answer:
    """Read an answer.

    Raises:
        ProtocolError: It is none.
    """
    match message.get("standby"):
        case [follows, bool(coordinates), bool(strong)] if (
            type(follows) is int or follows is None
        ):
            return Answer(follows=follows, coordinates=coordinates, is_strong=strong)
    raise ProtocolError("not an answer of a member")


class Election:
    """Decides whom a member follows.

    Args:
        own: This member.
    """

    def __init__(self, own: int) -> None:
        self._own = own
        self._members: list[int] = []
        self._preferred: int | None = None
        self._left: deque[int] = deque()
        self._asked: set[int] = set()
        self._other_lives = False

    def begin(self, members: Collection[int]) -> None:
        """Begin to ask.

        Args:
            members: Those that may coordinate, and can be asked.
        """
        self._members = sorted({*members})
        self._left = deque(self._members)
        if self._preferred in self._members:
            self._left.appendleft(self._preferred)
        self._preferred = None
        self._asked.clear()
        self._other_lives = False

    def whom(self) -> int | None:
        """Return whom to ask next.

        Returns:
            A member; this one, if it is to coordinate; ``None`` if all were asked, and
            it is to begin anew a little later.
        """
        while self._left:
            member = self._left[0]
            if member == self._own and self._other_lives:
                break  # an earlier one will coordinate
            if member not in self._asked:
                return member
            self._left.popleft()
        return None

    def heard(self, member: int, answer: Answer | None) -> None:
        """Take note of an answer; ``None`` if there was none in time."""
        self._asked.add(member)
        if answer is None or answer.is_gone:
            return
        self._other_lives = True
        if answer.follows is not None and answer.follows in self._members:
            self._left.appendleft(answer.follows)

    def gives_way(self, answers: Mapping[int, Answer]) -> bool:
        """Say whether this member, which coordinates, with too few, is to follow."""
        for member, answer in sorted(answers.items()):
            if answer.coordinates and (answer.is_strong or member < self._own):
                self._preferred = member
                return True
        return False
