"""The launching process and the scripts of the tests beside stock torchrun."""

from compared import folder, launcher  # noqa: F401
