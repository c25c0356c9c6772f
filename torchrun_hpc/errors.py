"""The one exception that stands for a fault of environment or command line."""

from __future__ import annotations


class LaunchError(Exception):
    """A fault that the user can mend; its text is the whole message to a person.

    Args:
        message: What is wrong, the values, the variable they came from, and what to
            type instead.
        everywhere: Whether all tasks find the same, because it follows from what is
            equal on all nodes. Then the first one reports it for all.
    """

    def __init__(self, message: str, *, everywhere: bool = False) -> None:
        super().__init__(message)
        self.everywhere = everywhere
