from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrun_hpc.rendezvous import key_value_store
from torchrun_hpc.rendezvous.key_value_store import KeyValueStore
from torchrun_hpc.wire import WireError


def answer(store, **question):
    """Return the answer to a question that can be answered at once."""
    ((connection, message),) = store.ask("agent", {"ask": 7, **question})
    assert (connection, set(message)) == ("agent", {"answer", "value"})
    assert message["answer"] == 7
    return message["value"]


def test_the_store():
    store = KeyValueStore()
    assert answer(store, check=["a"]) is False
    assert answer(store, set={"a": "1", "b": "x"}) is True
    assert answer(store, check=["a", "b"]) is True
    assert answer(store, get=["b", "a"]) == ["x", "1"]
    assert answer(store, get=["b", "a", "b"]) == ["x", "1"]  # or it could be endless
    assert answer(store, get=[]) == []
    assert answer(store, add="a", by=2) == 3
    assert answer(store, add="c", by=-5) == -5
    assert answer(store, get=["a", "c"]) == ["3", "-5"]
    assert answer(store, set={"a": ""}) is True
    assert answer(store, get=["a"]) == [""]


def test_an_answer_waits_until_all_keys_exist():
    store = KeyValueStore()
    assert store.ask(1, {"ask": 4, "get": ["a", "b"]}) == []
    assert store.ask(2, {"ask": 5, "get": ["b"]}) == []
    assert store.ask(0, {"ask": 1, "set": {"b": "2"}}) == [
        (2, {"answer": 5, "value": ["2"]}),
        (0, {"answer": 1, "value": True}),
    ]
    assert store.ask(0, {"ask": 2, "add": "a", "by": 1}) == [
        (1, {"answer": 4, "value": ["1", "2"]}),
        (0, {"answer": 2, "value": 1}),
    ]


def test_a_newer_question_takes_the_place_of_one_that_waits():
    """An agent that asks again has given up the first question."""
    store = KeyValueStore()
    assert store.ask(1, {"ask": 4, "get": ["a"]}) == []
    assert store.ask(2, {"ask": 4, "get": ["a"]}) == []
    assert store.ask(1, {"ask": 5, "get": ["b", "a"]}) == []
    assert store.ask(0, {"ask": 1, "set": {"a": "1", "b": "2"}}) == [
        (2, {"answer": 4, "value": ["1"]}),
        (1, {"answer": 5, "value": ["2", "1"]}),
        (0, {"answer": 1, "value": True}),
    ]


# What a connection does with a store, of which a key is missing.
WAITS = {"get": ["a", "c"]}
WAITING = {
    "it ends": [None],
    "it has ended, and ends once more": [None, None],
    "it asks for a thousand keys, one after the other": [
        *({"get": [f"missing {number}"]} for number in range(1000)),
        None,
    ],
    "it asks for what is there": [{"get": ["a"]}],
    "it has the first one of two keys, and ends": [{"set": {"b": ""}}, WAITS, None],
    "it gets its answer, and ends": [{"set": {"c": ""}}, None],
    "it asks again for a key that another one waits for": [WAITS, WAITS, None],
}


@pytest.mark.parametrize("case", WAITING)
def test_nothing_is_kept_of_a_question_that_nobody_waits_for(case):
    store = KeyValueStore()
    answer(store, set={"a": "1"})
    store.ask("other", {"ask": 1, "get": ["c"]})
    store.ask("agent", {"ask": 1, **WAITS})
    for number, question in enumerate(WAITING[case]):
        if question is None:
            store.forget("agent")
        else:
            store.ask("agent", {"ask": number, **question})
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
            | st.sets(st.sampled_from("abc")).map(lambda keys: {"get": sorted(keys)})
            | st.sampled_from("abc").map(lambda key: {"set": {key: "x"}}),
        )
    )
)
def test_a_question_is_answered_once_or_forgotten(happens):
    """Against a store that looks through all questions each time."""
    store, known, waiting = KeyValueStore(), set(), {}
    for number, (who, question) in enumerate(happens):
        expected = []
        if question is None:
            waiting.pop(who, None)
            store.forget(who)
            continue
        if "set" in question:
            known |= question["set"].keys()
            expected.append((who, number))
        else:
            waiting[who] = number, {*question["get"]}
        for each, (asked, keys) in [*waiting.items()]:
            if keys <= known:
                expected.append((each, asked))
                del waiting[each]
        answers = store.ask(who, {"ask": number, **question})
        found = [(each, message["answer"]) for each, message in answers]
        assert sorted(found) == sorted(expected)
        assert store._missing.keys() == waiting.keys()
        in_lists = [each for group in store._waiting.values() for each in group]
        assert sorted(in_lists) == sorted(waiting)


NO_QUESTIONS = [
    {},
    {"set": None},
    {"set": ["a"]},
    {"add": "a"},
    {"add": "a", "by": "one"},
    {"add": "a", "by": None},
    {"add": "a", "by": 1e300},  # an integer of as many digits
    {"add": "a", "by": float("inf")},
    {"add": "a", "by": float("nan")},
    {"add": "text", "by": 1},
    {"check": None},
    {"check": 1},
    {"check": [[]]},
    {"get": None},
    {"get": 1},
]


@pytest.mark.parametrize("question", NO_QUESTIONS)
def test_what_is_no_question(question):
    store = KeyValueStore()
    answer(store, set={"text": "x"})
    with pytest.raises(WireError):
        store.ask(1, {"ask": 1, **question})


def test_the_store_has_its_limit(monkeypatch):
    monkeypatch.setattr(key_value_store, "LIMIT", 10)
    store = KeyValueStore()
    for value in ("12345678", "x", "1234567"):  # a value that was replaced is gone
        assert answer(store, set={"a": value}) is True
    with pytest.raises(WireError, match="too much"):
        store.ask(0, {"ask": 1, "set": {"b": "123"}})
    assert answer(store, set={"b": "1"}) is True  # others may go on
