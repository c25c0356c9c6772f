"""The environment variables that ``import torch`` reads.

``read_at_import.txt`` has one name per line. A name with ``*`` at its end stands for
all names with this beginning. ``tests/harness/read_at_import.py`` found the names in
PyTorch 2.0 to 2.15: it records what Python code reads from ``os.environ``, and what
libraries read by getenv(3).
"""

from __future__ import annotations

import functools
from pathlib import Path

# scikit-learn sets these for OpenMP libraries that are loaded later, and for forks.
_OF_OTHERS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")

_DATA = Path(__file__).with_suffix(".txt")


@functools.cache
def _listed() -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names, and the beginnings of names."""
    lines = _DATA.read_text(encoding="ascii").splitlines()
    names = frozenset(line for line in lines if line and line[0] != "#")
    return names, tuple(name[:-1] for name in names if name.endswith("*"))


def is_read(name: str) -> bool:
    """Return whether ``import torch`` reads a variable in some release of PyTorch."""
    names, beginnings = _listed()
    return name in names or (name.startswith(beginnings) and name not in _OF_OTHERS)
