"""Small programs that run beside the launcher, each in its own Python process.

Each is one file, which imports only standard modules, so it starts fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

FOLDER = Path(__file__).parent

PIPE = -1  # subprocess.PIPE, whose import direct mode avoids
_STREAMS = ("stdin", "stdout", "stderr")


def start(name: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start ``NAME.py`` of this folder in its own session, which Ctrl-C does not reach.

    By default, its standard streams are /dev/null. ``options`` are for
    `subprocess.Popen`.
    """
    import subprocess  # noqa: PLC0415 - direct mode rarely needs it

    streams: dict[str, Any] = dict.fromkeys(_STREAMS, subprocess.DEVNULL)
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-IS", str(FOLDER / f"{name}.py"), *arguments],
        start_new_session=True,
        **(streams | options),
    )
