"""Questions of an agent: to the coordinator's store, and to all agents."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Collection, Mapping


class Questions:
    """What an agent asks through the coordinator, and the answers.

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
        self._answers: dict[int, Any] = {}
        self._of_nodes: dict[int, dict[int, Any]] = {}  # by question, and node

    def ask(
        self,
        question: Mapping[str, Any],
        is_over: Callable[[], bool],
        timeout: float,
    ) -> Any:
        """Ask the store.

        Args:
            question: What is asked.
            is_over: Returns whether no answer is wanted any more.
            timeout: Seconds to wait for one.
        """
        with self._changed:
            self._asked = number = self._asked + 1
        self._send({"ask": number, **question})
        self._until(lambda: number in self._answers or is_over(), timeout)
        return self._answers.pop(number, None)

    def answered(self, message: Mapping[str, Any]) -> None:
        """Take note of the store's answer."""
        with self._changed:
            self._answers[message["answer"]] = message.get("value")
            self._changed.notify_all()

    def ask_all(
        self, nodes: Callable[[], Collection[int]], timeout: float
    ) -> dict[int, Any]:
        """Ask all for the stacks of their workers; return the answers, by node.

        Args:
            nodes: Returns the nodes that are waited for.
            timeout: Seconds to wait.
        """
        with self._changed:  # several threads ask
            self._asked = number = self._asked + 1
            answers = self._of_nodes[number] = {}
        self._send({"stacks": number})
        # None, where there is no coordinator, or no job any more.
        with contextlib.suppress(Exception):
            self._until(lambda: {*nodes()} <= answers.keys(), timeout)
        with self._changed:
            del self._of_nodes[number]
        return answers

    def answered_by_node(self, message: Mapping[str, Any]) -> None:
        """Take note of a node's answer, unless it comes too late."""
        number, node = message["sampled"], message.get("node")
        with self._changed:
            if type(number) is type(node) is int and number in self._of_nodes:
                self._of_nodes[number][node] = message.get("of")
            self._changed.notify_all()
