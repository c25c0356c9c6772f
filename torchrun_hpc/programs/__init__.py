"""Small programs that run beside the launcher, each in a Python of its own.

They start fast: they import a few modules of Python, and none of this package.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent

_STREAMS = ("stdin", "stdout", "stderr")


def start(name: str, *arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own: Ctrl-C is not for it.

    Args:
        name: Of its file in this folder.
        arguments: For the program.
        options: For `subprocess.Popen`. Without, its standard streams lead nowhere.

    Raises:
        OSError: There can be no more processes.
    """
    streams: dict[str, Any] = dict.fromkeys(_STREAMS, subprocess.DEVNULL)
    return subprocess.Popen(  # noqa: S603
        [sys.executable, "-IS", str(FOLDER / f"{name}.py"), *arguments],
        start_new_session=True,
        **(streams | options),
    )
