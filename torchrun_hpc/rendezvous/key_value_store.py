"""The values that PyTorch's agents share in a round. The coordinator keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc.rendezvous.protocol import Add, Answer, Check, Get, Set
from torchrun_hpc.wire import WireError

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    from torchrun_hpc.rendezvous.protocol import Ask, Outgoing

# Characters that agents may store. PyTorch needs 100 per node.
LIMIT = 64 * 2**20


class _Waiting(NamedTuple):
    connection: Hashable
    number: int
    keys: list[str]
    start: int = 0  # the keys before this one exist


class KeyValueStore:
    """A store of texts. A request for a missing key is answered once the key exists.

    One request of each connection may wait: an agent sends one at a time. An answer has
    the value of each key once, so it is no larger than the store.
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._size = 0
        # Waiting requests, by the first missing key, and by connection.
        self._waiting: dict[str, dict[Hashable, _Waiting]] = {}
        self._missing: dict[Hashable, str] = {}  # the first missing key, by connection

    def ask(self, connection: Hashable, ask: Ask) -> Iterator[Outgoing]:
        """Answer a request, and those waiting for its keys; or raise `WireError`."""
        number = ask.number
        match ask.request:
            case Set(values):
                yield from self._set(values)
                yield connection, Answer(number, value=True)
            case Add(key, by):
                try:
                    total = int(self._values.get(key, "0")) + by
                    text = str(total)  # also a ValueError, if it is too long
                except ValueError:
                    raise WireError("not a number in the store") from None
                yield from self._set({key: text})
                yield connection, Answer(number, total)
            case Check(keys):
                yield connection, Answer(number, all(k in self._values for k in keys))
            case Get(keys):
                self.forget(connection)
                each_once = [*dict.fromkeys(keys)]
                yield from self._get(_Waiting(connection, number, each_once))

    def forget(self, connection: Hashable) -> None:
        """Forget a connection's waiting request."""
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
            for request in self._waiting.pop(key, {}).values():
                del self._missing[request.connection]
                yield from self._get(request)

    def _get(self, request: _Waiting) -> Iterator[Outgoing]:
        for index in range(request.start, len(request.keys)):
            key = request.keys[index]
            if key not in self._values:
                later = request._replace(start=index)
                self._waiting.setdefault(key, {})[request.connection] = later
                self._missing[request.connection] = key
                return
        values = [self._values[key] for key in request.keys]
        yield request.connection, Answer(request.number, values)
