"""A copy of stdin to stdout, until all writers have ended."""

import os
import select

while piece := os.read(0, 256 * 1024):
    while piece:
        select.select([], [1], [])
        try:
            piece = piece[os.write(1, piece) :]
        except BlockingIOError:
            pass
