"""The launching process and the scripts of the tests beside stock torchrun."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("compared", "parsers")

from compared import folder, launcher  # noqa: E402, F401
