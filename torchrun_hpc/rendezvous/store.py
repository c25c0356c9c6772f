"""The store in which PyTorch's agents share what they know of their workers."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed

from torchrun_hpc.torch_compat import capabilities

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrun_hpc.rendezvous.client import Client

_torch: Any = distributed


class AgentStore(_torch.Store):  # type: ignore[misc]
    """A store that the coordinator keeps. A wait ends when the job fails.

    Questions may raise `JobFailedError`, `RoundOverError`, or PyTorch's timeout error.
    Keys in `known` have fixed values, and are never asked for.
    """

    def __init__(self, client: Client, known: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._client = client
        self._known = known or {}
        self._timeout = timedelta(seconds=300)

    @property
    def timeout(self) -> timedelta:
        """How long to wait for a key."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long to wait for a key."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set one key."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        data = (v.encode() if isinstance(v, str) else bytes(v) for v in values)
        # As text in JSON; `multi_get` makes it bytes again.
        texts = zip(keys, (each.decode("latin-1") for each in data), strict=True)
        new = {key: text for key, text in texts if key not in self._known}
        if new:
            self._ask({"set": new})

    def add(self, key: str, amount: int) -> int:
        """Add to a number, 0 at first, and return it."""
        return int(self._ask({"add": key, "by": amount}))

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        asked = self._unknown(keys)
        return not asked or bool(self._ask({"check": asked}))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it exists."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, once all exist."""
        asked = self._unknown(keys)
        answers = self._ask({"get": asked}) if asked else []
        values = {**dict(zip(asked, answers, strict=True)), **self._known}
        return [str(values[key]).encode("latin-1") for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until several keys exist."""
        asked = self._unknown(keys)
        if asked:
            self._ask({"get": asked}, timeout)

    def _unknown(self, keys: Sequence[str]) -> list[str]:
        return [key for key in dict.fromkeys(keys) if key not in self._known]

    def _ask(
        self, question: Mapping[str, Any], timeout: timedelta | None = None
    ) -> Any:
        limit = (self._timeout if timeout is None else timeout).total_seconds()
        try:
            return self._client.ask(question, limit)
        except TimeoutError:
            text = f"no answer within {limit:.0f} s"
            raise capabilities.STORE_ERROR(text) from None
