"""The question to all agents what their workers are doing, and the answers."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping


class Stacks:
    """Asks all agents for the stacks of their workers.

    Args:
        changed: Notified of answers.
        until: Waits for a condition, or raises.
        send: Sends to the coordinator.
    """

    def __init__(
        self,
        changed: threading.Condition,
        until: Callable[[Callable[[], bool], float], None],
        send: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._changed, self._until, self._send = changed, until, send
        self._asked = 0
        self._answers: dict[int, dict[int, Any]] = {}  # by question, and node

    def ask(
        self, nodes: Callable[[], Collection[int]], timeout: float
    ) -> dict[int, Any]:
        """Return the answers of nodes, as far as they come in time.

        Args:
            nodes: Returns the nodes that are waited for.
            timeout: Seconds to wait.
        """
        with self._changed:  # several threads ask
            self._asked = number = self._asked + 1
            answers = self._answers[number] = {}
        self._send({"stacks": number})
        # None, where there is no coordinator, or no job any more.
        with contextlib.suppress(Exception):
            self._until(lambda: {*nodes()} <= answers.keys(), timeout)
        with self._changed:
            del self._answers[number]
        return answers

    def answered(self, message: Mapping[str, Any]) -> None:
        """Take note of an answer, unless it comes too late."""
        number, node = message["sampled"], message.get("node")
        with self._changed:
            if type(number) is type(node) is int and number in self._answers:
                self._answers[number][node] = message.get("of")
            self._changed.notify_all()
