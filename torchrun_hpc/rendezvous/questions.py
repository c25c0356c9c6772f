"""An agent's questions: to the coordinator's store, and to all agents."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping


class Questions:
    """An agent's questions through the coordinator, and the answers."""

    def __init__(
        self,
        changed: threading.Condition,
        until: Callable[[Callable[[], bool], float], None],
        send: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._changed, self._until, self._send = changed, until, send
        self._asked = 0
        self._answers: dict[int, Any] = {}
        self._of_nodes: dict[int, dict[int, Any]] = {}  # by question and node

    def ask(
        self,
        question: Mapping[str, Any],
        is_over: Callable[[], bool],
        timeout: float,
    ) -> Any:
        """Ask the store; wait for `timeout` seconds, or until the question is over."""
        with self._changed:
            self._asked = number = self._asked + 1
        self._send({"ask": number, **question})
        self._until(lambda: number in self._answers or is_over(), timeout)
        return self._answers.pop(number, None)

    def answered(self, message: Mapping[str, Any]) -> None:
        """Keep the store's answer."""
        with self._changed:
            self._answers[message["answer"]] = message.get("value")
            self._changed.notify_all()

    def ask_all(
        self,
        what: str,
        wait: Callable[[dict[int, Any]], None],
        about: Any = None,
    ) -> dict[int, Any]:
        """Ask all nodes; return their replies, without those that are ``None``.

        `wait` waits for enough of the replies so far; the reply of a lost node is
        ``None``. `about` is plain data for the nodes.
        """
        with self._changed:  # several threads ask
            self._asked = number = self._asked + 1
            replies = self._of_nodes[number] = {}
        self._send({"question": number, "what": what, "with": about})
        try:
            wait(replies)
        finally:
            self._send({"question": number})
            with self._changed:
                del self._of_nodes[number]
        return {node: of for node, of in replies.items() if of is not None}

    def replied(self, message: Mapping[str, Any]) -> None:
        """Keep a node's reply, unless it is late."""
        number, node = message["replied"], message.get("node")
        with self._changed:
            if type(number) is type(node) is int and number in self._of_nodes:
                self._of_nodes[number][node] = message.get("of")
            self._changed.notify_all()
