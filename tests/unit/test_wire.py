"""Lines of JSON between processes, and the checks of what has arrived."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any, TypedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrun_hpc import wire
from torchrun_hpc.rendezvous import protocol
from torchrun_hpc.wire import Lines, WireError

INTEGERS = st.integers(-(2**63), 2**63 - 1)
values = st.recursive(
    st.none() | st.booleans() | INTEGERS | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=4,
)

# --- lines --------------------------------------------------------------------------

# Bytes that arrive, and their messages; None if they are refused.
LINES = {
    "nothing": (b"", []),
    "a message": (b'{"join":0}\n', [{"join": 0}]),
    "two": (b'{"join":0}\n{"bye":true}\n', [{"join": 0}, {"bye": True}]),
    "half a message": (b'{"join":', []),
    "one and a half": (b'{"join":0}\n{"b', [{"join": 0}]),
    "an empty object": (b"{}\n", [{}]),
    "blanks around it": (b' {"join": 0}\r\n', [{"join": 0}]),
    "letters beyond ASCII": ('{"host":"jülich"}\n'.encode(), [{"host": "jülich"}]),
    "an empty line": (b"\n", None),
    "a number": (b"1\n", None),
    "a list": (b"[]\n", None),
    "null": (b"null\n", None),
    "HTTP": (b"GET / HTTP/1.1\r\n\r\n", None),
    "no UTF-8": (b'{"a":"\xff"}\n', None),
    "a NUL": (b"\0\n", None),
    "deep": (b"[" * 90 + b"\n", None),
    "64 bits": (b'{"a":-9223372036854775808}\n', [{"a": -(2**63)}]),
    "many digits": (b'{"a":' + b"9" * 21 + b"}\n", None),
    "as long as may be": (b'{"a":"' + b"x" * 92 + b'"}\n', [{"a": "x" * 92}]),
    "too long": (b'{"a":"' + b"x" * 93 + b'"}\n', None),
    "too long without an end": (b"x" * 101, None),
    "not yet too long": (b"x" * 100, []),
    "many at once": (b"{}\n" * 67, [{}] * 67),
}  # fmt: skip


@pytest.mark.parametrize("case", LINES)
def test_what_arrives(case):
    data, expected = LINES[case]
    lines = Lines(100)
    if expected is None:
        with pytest.raises(WireError):
            list(lines.feed(data))
    else:
        assert list(lines.feed(data)) == expected


def test_a_message_is_read_when_it_is_asked_for():
    """Who stops at a wrong one does not pay for the thousands after it."""
    arrived = Lines(100).feed(b'{"a":1}\n[]\n{}\n')
    assert next(arrived) == {"a": 1}
    with pytest.raises(WireError):
        next(arrived)
    assert list(arrived) == []


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 10_000])
def test_what_would_be_too_much_for_json(line):
    with pytest.raises(WireError):
        next(Lines(10**6).feed(line + b"\n"))


def test_the_limit_may_grow_between_two_messages():
    """It is small until the other side has sent who it is."""
    lines = Lines(protocol.JOIN_REQUEST_LIMIT)
    long = wire.to_line({"set": "x" * protocol.JOIN_REQUEST_LIMIT})
    with pytest.raises(WireError, match="more than 4096 bytes"):
        next(lines.feed(long))
    lines = Lines(protocol.JOIN_REQUEST_LIMIT)
    assert len([*lines.feed(wire.to_line({"protocol": 1}))]) == 1
    lines.limit = protocol.LINE_LIMIT
    assert [*lines.feed(long)] == [{"set": "x" * protocol.JOIN_REQUEST_LIMIT}]


def test_a_long_line_in_small_pieces():
    """Each byte is looked at once, however long the line is by then."""

    def cost(rest):
        lines = Lines(protocol.LINE_LIMIT)
        list(lines.feed(b"x" * rest))
        start = time.process_time()
        for _ in range(300):
            list(lines.feed(b"x"))
        return time.process_time() - start

    # A search of all that has arrived costs some hundred times as much.
    assert min(cost(2**20) for _ in range(3)) < 20 * min(cost(1) for _ in range(3))


messages = st.dictionaries(st.text(), values, max_size=3)


@settings(deadline=None)
@given(st.lists(messages, max_size=5), st.data())
def test_lines_cut_anywhere_give_the_same_messages(sent, data):
    written = b"".join(map(wire.to_line, sent))
    assert written.count(b"\n") == len(sent)  # one line each, whatever is in it
    cuts = data.draw(st.lists(st.integers(0, len(written)), max_size=8).map(sorted))
    lines = Lines(10**6)
    arrived: list[object] = []
    for begin, end in zip([0, *cuts], [*cuts, len(written)], strict=True):
        arrived += lines.feed(written[begin:end])
    # Text, because NaN is not itself.
    assert json.dumps(arrived) == json.dumps(sent)


@given(st.lists(st.binary(max_size=60) | st.just(b"\n") | st.just(b'{"a":[0]}\n')))
def test_any_bytes(pieces):
    lines = Lines(100)
    with suppress(WireError):
        for piece in pieces:
            for message in lines.feed(piece):
                assert type(message) is dict


# --- values -------------------------------------------------------------------------


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


def is_even(value):
    if value % 2:
        raise ValueError("odd")
    return value


@dataclass(frozen=True)
class Part:
    name: str
    raw: wire.AnyText = ""
    short: Annotated[str, wire.short_text(3)] = ""
    even: Annotated[int, is_even] = 0

    def check(self):
        if self.name == self.raw:
            raise ValueError("twice")


@dataclass(frozen=True)
class Whole:
    number: int = 0
    share: float = 0.0
    is_on: bool = False
    colour: Colour = Colour.RED
    pair: tuple[int, str] = (0, "")
    many: tuple[Part, ...] = ()
    listed: list[int] = field(default_factory=list)
    few: Sequence[Colour] = ()
    named: Mapping[str, Part] = field(default_factory=dict)
    counted: Mapping[int, tuple[int, str]] = field(default_factory=dict)
    maybe: Part | None = None
    anything: Any = ""


class Typed(TypedDict):
    part: list[dict[str, int]]
    maybe: str | None


TEXTS = st.text().filter(str.isprintable)
PARTS = st.builds(Part, TEXTS, st.text(), TEXTS.map(lambda t: t[:3])).filter(
    lambda part: part.name != part.raw
)
COLOURS = st.sampled_from(Colour)
WHOLES = st.builds(
    Whole,
    number=INTEGERS,
    share=st.floats(allow_nan=False, allow_infinity=False),
    is_on=st.booleans(),
    colour=COLOURS,
    pair=st.tuples(INTEGERS, TEXTS),
    many=st.lists(PARTS, max_size=2).map(tuple),
    listed=st.lists(INTEGERS),
    few=st.lists(COLOURS).map(tuple),
    named=st.dictionaries(TEXTS, PARTS, max_size=2),
    counted=st.dictionaries(INTEGERS, st.tuples(INTEGERS, TEXTS), max_size=2),
    maybe=st.none() | PARTS,
    anything=TEXTS,
)


def as_sent(value):
    return wire.from_json(wire.to_line(wire.encode(value)))


@settings(deadline=None)
@given(WHOLES)
def test_any_value_arrives_as_it_was_sent(whole):
    assert wire.decode(Whole, wire.encode(whole)) == whole
    assert wire.decode(Whole, as_sent(whole)) == whole


NO_PARTS: list[object] = [
    *(None, 1, "a", [], {}, {"name": "a"}, {"name": 1, "raw": "", "short": ""}),
    *({"name": "a", "raw": "a", "short": "", "even": 0},),
    *({"name": "a", "raw": "", "short": "long", "even": 0},),
    *({"name": "a", "raw": "", "short": "\n", "even": 0},),
    *({"name": "a\n", "raw": "", "short": "", "even": 0},),
    *({"name": "a", "raw": 1, "short": "", "even": 0},),
    *({"name": "a", "raw": "", "short": "", "even": 1},),
]
NO_INTEGERS: list[object] = [None, True, 1.0, "1", [], {}]
WRONG: dict[str, list[object]] = {
    "number": NO_INTEGERS,
    "share": [None, True, "1", float("nan"), float("inf"), 10**400],
    "is_on": [None, 0, 1, "true"],
    "colour": [None, "green", "RED", 1, ["red"], {}],
    "pair": [None, [1], [1, "a", 2], ["a", 1], "ab", {"1": "a"}],
    "many": [None, "a", {}, *([part] for part in NO_PARTS)],
    "listed": [None, "12", 1, [True], [[1]], [None]],
    "few": [None, "red", ["green"], [["red"]]],
    "named": [None, [], "a", {"a": None}, {"\x1b": {}}],
    "counted": [None, {}, [[1]], [[1, [1, "a"], 2]], ["12"], [["1", [1, "a"]]]],
    "maybe": NO_PARTS[1:],
    "anything": [None, 1, [], {}, "\x1b[2J", "\ud800", float("nan")],
}


@pytest.mark.parametrize("name", WRONG)
def test_values_of_another_type(name):
    sent = as_sent(Whole())
    for value in WRONG[name]:
        with pytest.raises(WireError, match=r"^not a whole$"):
            pytest.fail(str(wire.decode(Whole, sent | {name: value})))


@given(values | st.dictionaries(st.sampled_from(list(WRONG)), values, max_size=2))
def test_anything_for_a_value(value):
    data = as_sent(Whole()) | value if isinstance(value, dict) else value
    with suppress(WireError):
        whole = wire.decode(Whole, data)
        assert wire.decode(Whole, wire.encode(whole)) == whole


def test_what_is_missing_and_what_is_too_much():
    sent = as_sent(Whole(maybe=Part("a")))
    for name in sent:
        without = {key: value for key, value in sent.items() if key != name}
        if name == "maybe":
            assert wire.decode(Whole, without).maybe is None
        else:
            with pytest.raises(WireError):
                wire.decode(Whole, without)
    assert wire.decode(Whole, sent | {"more": "\x1b[2J"}) == Whole(maybe=Part("a"))


def test_what_cannot_be_sent_is_cut_or_written_as_text():
    part = Part("\n", "\n\ud800", short="a\x1bbc")
    assert wire.encode(part) == {
        "name": "\n",
        "raw": "\n\ud800",
        "short": "a b",
        "even": 0,
    }
    assert wire.encode(Whole(anything=4))["anything"] == "4"


def test_typed_dictionaries_and_parts_of_them():
    data = {"part": [{"a": 1}], "maybe": None, "more": 1}
    assert wire.decode(Typed, data) == {"part": [{"a": 1}], "maybe": None}
    with pytest.raises(WireError, match="not a typed"):
        wire.decode(Typed, data | {"part": [{"a": True}]})
    assert wire.decode(tuple[int, str], [1, "a"]) == (1, "a")
    with pytest.raises(WireError, match="not a"):
        wire.decode(tuple[int, str], [1])


def test_a_name_has_words_in_what_is_raised():
    with pytest.raises(WireError, match=r"^not a join request$"):
        wire.decode(protocol.JoinRequest, None)


# --- unions, and data for who asked -------------------------------------------------


@dataclass(frozen=True)
class ManyParts:
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Wrapped:
    anything: wire.Plain


UNION: Any = Colour | ManyParts | Part | Wrapped
MANY = ManyParts((Part("a"),))


@pytest.mark.parametrize(
    ("value", "sent"),
    [
        (Colour.RED, {"colour": "red"}),
        (ManyParts(), {"many_parts": {"parts": []}}),
        (MANY, {"many_parts": {"parts": [wire.encode(Part("a"))]}}),
        (Part("a"), {"part": {"name": "a", "raw": "", "short": "", "even": 0}}),
        (Wrapped([1]), {"wrapped": {"anything": [1]}}),
    ],
)
def test_the_class_of_a_value_is_its_only_key(value, sent):
    assert wire.encode(value, UNION) == sent
    assert wire.decode(UNION, sent) == value
    assert wire.decode(UNION, wire.from_json(wire.to_line(sent))) == value


@pytest.mark.parametrize(
    "data",
    [
        *(None, 1, "red", "colour", [], ["colour", "red"], [["colour", "red"]]),
        *({}, {"red": "red"}, {"Colour": "red"}, {"colours": "red"}, {"": "red"}),
        *({"ManyParts": {"parts": []}}, {"manyparts": {"parts": []}}, {"parts": []}),
        *({"colour": "red", "part": wire.encode(Part("a"))},),
        *({"colour": "red", "more": 1}, {"colour": "red", "many_parts": None}),
        *({"colour": None}, {"colour": "green"}, {"colour": {"colour": "red"}}),
        *({"part": {}}, {"part": None}, {"part": {"parts": []}}, {"part": "red"}),
        *({"many_parts": wire.encode(Part("a"))},),
        *({"many_parts": {"parts": [{"part": wire.encode(Part("a"))}]}},),
    ],
    ids=str,
)
def test_what_is_of_no_class_of_a_union(data):
    with pytest.raises(WireError, match=r"^not a message$"):
        pytest.fail(str(wire.decode(UNION, data)))


def test_a_value_of_another_class_is_not_sent():
    """Also not as one of the class from which it is made."""

    class Other(Part):
        pass

    for value in (Whole(), Other("a"), "red", None):
        with pytest.raises(KeyError):
            wire.encode(value, UNION)


@given(values)
def test_what_is_for_who_asked_arrives_as_it_is(value):
    """Neither checked nor changed: text, because NaN is not itself."""
    arrived = wire.decode(Wrapped, as_sent(Wrapped(value))).anything
    assert json.dumps(arrived) == json.dumps(value)


@given(st.permutations(range(9)) | st.lists(INTEGERS))
def test_any_places_arrive_as_they_were_sent(numbers):
    sent = wire.to_line(wire.encode(numbers, wire.Places))
    assert wire.decode(wire.Places, wire.from_json(sent)) == tuple(numbers)


def test_numbers_that_are_their_own_places_need_few_bytes():
    assert wire.encode(range(10_000), wire.Places) == [10_000, []]
    assert wire.encode((0, 7, 2), wire.Places) == [3, [(1, 7)]]


@pytest.mark.parametrize(
    "data",
    [
        *(None, 1, "", {}, [], [1], [1, [], 2], [[], 1], {"1": []}),
        *([None, []], [True, []], [1.0, []], ["1", []], [1, None], [1, 1]),
        *([1, [0]], [1, [[0]]], [1, [[0, 1, 2]]], [1, [[0, "1"]]], [1, [[0, True]]]),
        *([1, [["0", 1]]], [1, [[None, 1]]], [1, [[1, 1]]], [0, [[0, 0]]]),
        *([2**63, []], [2**20 + 1, []], [-1, []], [3, [[-1, 7]]], [3, [[True, 7]]]),
    ],
    ids=str,
)
def test_what_has_no_places(data):
    with pytest.raises(WireError):
        pytest.fail(str(wire.decode(wire.Places, data)))


def test_nothing_for_who_asked_is_none():
    assert wire.decode(Wrapped, {}) == Wrapped(None)


written = (PARTS | COLOURS).map(wire.encode)
tags = st.sampled_from(["colour", "many_parts", "part"])


@given(st.dictionaries(tags, values | written, max_size=2))
def test_anything_for_a_union(data):
    with suppress(WireError):
        value = wire.decode(UNION, data)
        assert wire.decode(UNION, wire.encode(value, UNION)) == value
