"""The one exception that stands for a fault of environment or command line."""

from __future__ import annotations


class LaunchError(Exception):
    """A fault that the user can mend; its text is the whole message to a person.

    Args:
        message: What is wrong, the values, the variable they came from, and what to
            type instead.
        speak: Whether this process prints the message. Where every node would print
            the same thing, only the first task does.
    """

    def __init__(self, message: str, *, speak: bool = True) -> None:
        super().__init__(message)
        self.speak = speak
