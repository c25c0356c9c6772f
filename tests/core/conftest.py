"""The launching process and the scripts of the tests beside stock torchrun."""

from tests.support.stock.compared import (  # noqa: F401
    folder,
    launch,
    launcher,
    outside_of_jobs,
)
