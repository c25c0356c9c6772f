"""The launching process and the scripts of the tests beside stock torchrun."""

from tests.support.stock.compared import folder, launcher  # noqa: F401
