"""Fixtures of the tests beside stock torchrun."""

from tests.support.stock.compared import (  # noqa: F401
    folder,
    launch,
    launcher,
    outside_of_jobs,
)
