"""The log level of torch's C++ code, which torch reads only at its import."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import torch

_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"
_INIT_LOGGING = "_ZN3c1011initLoggingEv"  # c10::initLogging(), c10/util/Logging.h


def read_level() -> None:
    """Let torch read ``TORCH_CPP_LOG_LEVEL`` again, so that it prints less."""
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(str(_LIBRARY)), _INIT_LOGGING)()
