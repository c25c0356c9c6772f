"""Slurm's short forms: host lists (``n[08-11,20]``) and counts (``2(x3),1``).

A node's rank is its index in the expanded list, so the order must be exactly Slurm's.
Sources: Slurm's ``src/common/hostlist.c``, and the output of ``scontrol show
hostnames``. scontrol guesses at a broken list (``n[1-``); this module refuses it.
"""

from __future__ import annotations

import re
from itertools import product

from torchrun_hpc.errors import shortened

MAX_HOSTS = 65_536
"""The maximum number of hosts in a list. It is Slurm's MAX_RANGE, for one range."""

_MAX_NAME = 253
"""The maximum length of a host name with its domain (RFC 1035)."""

_MAX_QUOTE = 40  # characters of a list that a message quotes

_SEPARATORS = re.compile(r"[, \t\n]*")
_ELEMENT = re.compile(r"(?:[A-Za-z0-9._-]|\[[^]]*\])+")
_BRACKET = re.compile(r"\[(?P<ranges>[^]]*)\](?P<text>[^[]*)")
_RANGE = re.compile(rf"([0-9]{{1,{_MAX_NAME}}})(?:-([0-9]{{1,{_MAX_NAME}}}))?")
_MISPLACED = {"[": "opens a bracket that is not closed", "]": "closes no bracket"}
_COUNT = re.compile(r"([1-9][0-9]{0,8})(?:\(x([1-9][0-9]{0,8})\))?")


class HostlistError(ValueError):
    """A malformed list of hosts or counts; the message names fault and position."""


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Return the 1 to `MAX_HOSTS` names in a Slurm host list, in its order.

    Commas, blanks, tabs or newlines separate elements. An element is a host name (ASCII
    letters, digits, ``-``, ``_``, ``.``). Any part can be a bracket of numbers and
    ranges. The low end of a range sets the padded width: ``n[08-11]`` is n08, n09, n10,
    n11, and ``n[8-011]`` is n8, n9, n10, n11. Slurm accepts text after a bracket
    (``n[1-2]i``) since 23.02.5.

    Raises:
        HostlistError: The list is empty, malformed or too long.
    """
    hosts: list[str] = []
    at = 0
    while (at := _end(_SEPARATORS, text, at)) < len(text):
        end = _end(_ELEMENT, text, at)
        if end == at:
            reason = _MISPLACED.get(text[at], "cannot be in a host name")
            raise _fault(text[at], at, reason)
        hosts += _expand_element(text[at:end], at, MAX_HOSTS - len(hosts))
        at = end
    if not hosts:
        raise HostlistError(f"{_quoted(text)} names no host")
    return tuple(hosts)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return 1 to `MAX_HOSTS` positive counts, one per node.

    SLURM_TASKS_PER_NODE is such a list (srun(1)): ``2(x3),1`` for 2, 2, 2, 1.

    Raises:
        HostlistError: The text has another form, or too many counts.
    """
    counts: list[int] = []
    at = 0
    for piece in text.split(","):
        match = _COUNT.fullmatch(piece)
        if match is None:
            raise _fault(piece, at, "is not a positive count such as 2 or 2(x3)")
        count, nodes = match.groups(default="1")
        if int(nodes) > MAX_HOSTS - len(counts):
            raise _fault(piece, at, f"makes more than {MAX_HOSTS:,} nodes")
        counts += [int(count)] * int(nodes)
        at += len(piece) + 1
    return tuple(counts)


def _expand_element(element: str, at: int, room: int) -> list[str]:
    """Return the names of one element, ``room`` at most, in Slurm's order.

    The last bracket varies fastest, then the first, the second, and so on:
    ``a[0-1]b[0-1]c[0-1]`` begins a0b0c0, a0b0c1, a1b0c0.
    """
    if room == 0:
        raise _fault(element, at, f"exceeds the limit of {MAX_HOSTS:,} hosts")
    # Pairs of a bracket's numbers and the text after it. The first has only text.
    parts = [([""], element.partition("[")[0])]
    for bracket in _BRACKET.finditer(element):
        numbers = _expand_ranges(bracket["ranges"], at + bracket.start("ranges"), room)
        room //= len(numbers)
        parts.append((numbers, bracket["text"]))
    if sum(max(map(len, numbers)) + len(text) for numbers, text in parts) > _MAX_NAME:
        raise _fault(element, at, f"is a name of over {_MAX_NAME} characters")
    *slow, fast = [[number + text for number in numbers] for numbers, text in parts]
    return [
        "".join(reversed(pieces)) + last
        for *pieces, last in product(*reversed(slow), fast)
    ]


def _expand_ranges(text: str, at: int, room: int) -> list[str]:
    numbers: list[str] = []
    for piece in text.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _fault(piece, at, "is not a number or a range such as 1-3")
        low, high = match[1], match[2] or match[1]
        if int(low) > int(high):
            raise _fault(piece, at, "is a range that ends before it begins")
        if int(high) - int(low) >= room - len(numbers):
            raise _fault(piece, at, f"makes more than {MAX_HOSTS:,} hosts")
        width = len(low)
        numbers += [f"{n:0{width}}" for n in range(int(low), int(high) + 1)]
        at += len(piece) + 1
    return numbers


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return the end of the match at position ``at``; without a match, ``at``."""
    match = pattern.match(text, at)
    return match.end() if match else at


def _fault(piece: str, at: int, reason: str) -> HostlistError:
    return HostlistError(f"{_quoted(piece)} at position {at + 1} {reason}")


def _quoted(text: str) -> str:
    return repr(shortened(text, _MAX_QUOTE))
