from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.simulated_job import as_sent
from torchrun_hpc import wire
from torchrun_hpc.rendezvous import key_value_store
from torchrun_hpc.rendezvous.key_value_store import KeyValueStore
from torchrun_hpc.rendezvous.protocol import (
    FROM_AGENT,
    FROM_COORDINATOR,
    Add,
    Answer,
    Ask,
    Check,
    Get,
    Set,
)
from torchrun_hpc.wire import WireError


def ask(store, connection, question):
    """Ask a store; return pairs: who gets an answer, and the answer."""
    answers = store.ask(connection, as_sent(question, FROM_AGENT))
    return [(each, as_sent(message, FROM_COORDINATOR)) for each, message in answers]


def answer(store, kind, *values):
    """Return the answer to a question that can be answered at once."""
    ((connection, message),) = ask(store, "agent", Ask(7, kind(*values)))
    assert (connection, message.number) == ("agent", 7)
    return message.value


def test_the_store():
    store = KeyValueStore()
    assert answer(store, Check, ("a",)) is False
    assert answer(store, Set, {"a": "1", "b": "x"}) is True
    assert answer(store, Check, ("a", "b")) is True
    assert answer(store, Get, ("b", "a")) == ["x", "1"]
    assert answer(store, Get, ("b", "a", "b")) == ["x", "1"]  # or it could be endless
    assert answer(store, Get, ()) == []
    assert answer(store, Add, "a", 2) == 3
    assert answer(store, Add, "c", -5) == -5
    assert answer(store, Get, ("a", "c")) == ["3", "-5"]
    assert answer(store, Set, {"a": ""}) is True
    assert answer(store, Get, ("a",)) == [""]


def test_an_answer_waits_until_all_keys_exist():
    store = KeyValueStore()
    assert ask(store, 1, Ask(4, Get(("a", "b")))) == []
    assert ask(store, 2, Ask(5, Get(("b",)))) == []
    assert ask(store, 0, Ask(1, Set({"b": "2"}))) == [
        (2, Answer(5, ["2"])),
        (0, Answer(1, value=True)),
    ]
    assert ask(store, 0, Ask(2, Add("a", 1))) == [
        (1, Answer(4, ["1", "2"])),
        (0, Answer(2, 1)),
    ]


def test_a_newer_question_takes_the_place_of_one_that_waits():
    """An agent that asks again has given up the first question."""
    store = KeyValueStore()
    assert ask(store, 1, Ask(4, Get(("a",)))) == []
    assert ask(store, 2, Ask(4, Get(("a",)))) == []
    assert ask(store, 1, Ask(5, Get(("b", "a")))) == []
    assert ask(store, 0, Ask(1, Set({"a": "1", "b": "2"}))) == [
        (2, Answer(4, ["1"])),
        (1, Answer(5, ["2", "1"])),
        (0, Answer(1, value=True)),
    ]


# What a connection does with a store, of which a key is missing.
WAITS = Ask(1, Get(("a", "c")))
WAITING: dict[str, list[Ask | None]] = {
    "it ends": [None],
    "it has ended, and ends once more": [None, None],
    "it asks for a thousand keys, one after the other": [
        *(Ask(number, Get((f"missing {number}",))) for number in range(1000)),
        None,
    ],
    "it asks for what is there": [Ask(2, Get(("a",)))],
    "it has the first one of two keys, and ends": [Ask(2, Set({"b": ""})), WAITS, None],
    "it gets its answer, and ends": [Ask(2, Set({"c": ""})), None],
    "it asks again for a key that another one waits for": [WAITS, WAITS, None],
}


@pytest.mark.parametrize("case", WAITING)
def test_nothing_is_kept_of_a_question_that_nobody_waits_for(case):
    store = KeyValueStore()
    answer(store, Set, {"a": "1"})
    ask(store, "other", Ask(1, Get(("c",))))
    ask(store, "agent", WAITS)
    for question in WAITING[case]:
        if question is None:
            store.forget("agent")
        else:
            ask(store, "agent", question)
            assert len(store._missing) <= 2
    assert "agent" not in store._missing
    assert not any("agent" in group for group in store._waiting.values())
    assert store._waiting.keys() == set(store._missing.values())


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ABC"),
            st.none()
            | st.sets(st.sampled_from("abc")).map(
                lambda keys: Ask(0, Get((*sorted(keys),)))
            )
            | st.sampled_from("abc").map(lambda key: Ask(0, Set({key: "x"}))),
        )
    )
)
def test_a_question_is_answered_once_or_forgotten(happens):
    """Against a store that looks through all questions each time."""
    store = KeyValueStore()
    existing: set[str] = set()
    waiting: dict[str, tuple[int, set[str]]] = {}
    for number, (who, question) in enumerate(happens):
        expected = []
        if question is None:
            waiting.pop(who, None)
            store.forget(who)
            continue
        if isinstance(question.request, Set):
            existing |= question.request.values.keys()
            expected.append((who, number))
        else:
            waiting[who] = number, {*question.request.keys}
        for each, (asked, keys) in [*waiting.items()]:
            if keys <= existing:
                expected.append((each, asked))
                del waiting[each]
        answers = ask(store, who, replace(question, number=number))
        numbers = [(each, message.number) for each, message in answers]
        assert sorted(numbers) == sorted(expected)
        assert store._missing.keys() == waiting.keys()
        groups: Any = store._waiting.values()
        assert sorted(itertools.chain(*groups)) == sorted(waiting)


NO_QUESTIONS = [
    {},
    {"set": {"values": None}},
    {"set": {"values": ["a"]}},
    {"add": {"key": "a"}},
    {"add": {"key": "a", "by": "one"}},
    {"add": {"key": "a", "by": None}},
    {"add": {"key": "a", "by": 1e300}},  # an integer of as many digits
    {"add": {"key": "a", "by": float("inf")}},
    {"add": {"key": "a", "by": float("nan")}},
    {"add": {"key": "text", "by": 1}},
    {"check": {"keys": None}},
    {"check": {"keys": 1}},
    {"check": {"keys": [[]]}},
    {"get": {"keys": None}},
    {"get": {"keys": 1}},
]


@pytest.mark.parametrize("question", NO_QUESTIONS)
def test_what_is_no_question(question):
    store = KeyValueStore()
    answer(store, Set, {"text": "x"})
    with pytest.raises(WireError):
        list(store.ask(1, wire.decode(Ask, {"number": 1, "request": question})))


def test_no_number_gets_too_long():
    """Python reads more digits than it writes."""
    store = KeyValueStore()
    assert answer(store, Set, {"a": "9" * 4300}) is True
    with pytest.raises(WireError):
        answer(store, Add, "a", 1)


def test_the_store_has_its_limit(monkeypatch):
    monkeypatch.setattr(key_value_store, "LIMIT", 10)
    store = KeyValueStore()
    for value in ("12345678", "x", "1234567"):  # a value that was replaced is gone
        assert answer(store, Set, {"a": value}) is True
    with pytest.raises(WireError, match="too much"):
        ask(store, 0, Ask(1, Set({"b": "123"})))
    assert answer(store, Set, {"b": "1"}) is True  # others may continue
