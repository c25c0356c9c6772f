from __future__ import annotations

import pytest

from torchrun_hpc.rendezvous import key_value_store
from torchrun_hpc.rendezvous.key_value_store import KeyValueStore
from torchrun_hpc.rendezvous.protocol import ProtocolError


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
    assert answer(store, get=["b", "a", "b"]) == ["x", "1", "x"]
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


NO_QUESTIONS = [
    {},
    {"set": None},
    {"set": ["a"]},
    {"add": "a"},
    {"add": "a", "by": "one"},
    {"add": "a", "by": None},
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
    with pytest.raises(ProtocolError):
        store.ask(1, {"ask": 1, **question})


def test_the_store_has_its_limit(monkeypatch):
    monkeypatch.setattr(key_value_store, "LIMIT", 10)
    store = KeyValueStore()
    for value in ("12345678", "x", "1234567"):  # a value that was replaced is gone
        assert answer(store, set={"a": value}) is True
    with pytest.raises(ProtocolError, match="too much"):
        store.ask(0, {"ask": 1, "set": {"b": "123"}})
    assert answer(store, set={"b": "1"}) is True  # others may go on
