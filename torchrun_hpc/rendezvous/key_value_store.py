"""The values that PyTorch's agents share in a round. The coordinator keeps them."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    Outgoing = tuple[Hashable, Mapping[str, Any]]  # the connection, and the message

# Characters that agents may store. PyTorch needs 100 per node.
LIMIT = 64 * 2**20


class _Get(NamedTuple):
    connection: Hashable
    number: int
    keys: list[str]
    start: int = 0  # the keys before this one exist


class KeyValueStore:
    """A store of texts. A question for a missing key is answered once it exists.

    One question of each connection may wait: an agent asks one at a time. An answer has
    the value of each key once, so it is no larger than the store.
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._size = 0
        # Waiting questions, by the first missing key, and by connection.
        self._waiting: dict[str, dict[Hashable, _Get]] = {}
        self._missing: dict[Hashable, str] = {}  # that key, by connection

    def ask(self, connection: Hashable, message: Mapping[str, Any]) -> list[Outgoing]:
        """Answer a question, and those waiting for its keys; or raise `WireError`."""
        number = message["ask"]
        answers: list[Outgoing] = []
        try:
            if "set" in message:
                new = {str(k): str(v) for k, v in message["set"].items()}
                answers += self._set(new)
                value: Any = True
            elif "add" in message:
                key = str(message["add"])
                value = int(self._values.get(key, "0")) + operator.index(message["by"])
                answers += self._set({key: str(value)})
            elif "check" in message:
                value = all(key in self._values for key in message["check"])
            else:
                keys = [*dict.fromkeys(map(str, message["get"]))]
                self.forget(connection)
                return list(self._get(_Get(connection, number, keys)))
        except WireError:
            raise
        except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
            raise WireError("not a question to the store") from None
        return [*answers, (connection, {"answer": number, "value": value})]

    def forget(self, connection: Hashable) -> None:
        """Forget a connection's waiting question."""
        key = self._missing.pop(connection, None)
        if key is not None:
            del self._waiting[key][connection]
            if not self._waiting[key]:
                del self._waiting[key]

    def _set(self, values: Mapping[str, str]) -> Iterator[Outgoing]:
        for key, value in values.items():
            old = len(key) + len(self._values[key]) if key in self._values else 0
            size = self._size + len(key) + len(value) - old
            if size > LIMIT:
                raise WireError("too much for the store")
            self._size = size
            self._values[key] = value
        for key in values:
            for question in self._waiting.pop(key, {}).values():
                del self._missing[question.connection]
                yield from self._get(question)

    def _get(self, question: _Get) -> Iterator[Outgoing]:
        for index in range(question.start, len(question.keys)):
            key = question.keys[index]
            if key not in self._values:
                later = question._replace(start=index)
                self._waiting.setdefault(key, {})[question.connection] = later
                self._missing[question.connection] = key
                return
        values = [self._values[key] for key in question.keys]
        yield question.connection, {"answer": question.number, "value": values}
