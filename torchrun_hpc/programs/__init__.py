"""Small programs that run beside the launcher, each in its own Python process.

They import only standard modules, and nothing of this package, so they start fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

FOLDER = Path(__file__).parent

PIPE = -1  # subprocess.PIPE: direct mode does without that import
_STREAMS = ("stdin", "stdout", "stderr")


def start(name: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start ``NAME.py`` of this folder in its own session, which Ctrl-C does not reach.

    By default, its standard streams are null. ``options`` are for `subprocess.Popen`.
    """
    import subprocess  # noqa: PLC0415 - direct mode does without

    streams: dict[str, Any] = dict.fromkeys(_STREAMS, subprocess.DEVNULL)
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-IS", str(FOLDER / f"{name}.py"), *arguments],
        start_new_session=True,
        **(streams | options),
    )
