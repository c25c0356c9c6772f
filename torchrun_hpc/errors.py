"""The one exception that stands for a fault of environment or command line."""

from __future__ import annotations


class LaunchError(Exception):
    """A fault that the user can mend; its text is the whole message to a person.

    Args:
        message: What is wrong, the values, the variable they came from, and what to
            type instead.
        here: Whether it is a fault of this node alone. What all nodes find is
            reported by the first task only.
    """

    def __init__(self, message: str, *, here: bool = False) -> None:
        super().__init__(message)
        self.here = here
