"""A name server that answers nothing, and notes each question: nameserver.py FILE."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

with (
    Path(sys.argv[1]).open("w", encoding="utf-8") as notes,
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened,
):
    opened.bind(("", 53))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        question = opened.recv(512)
        labels, at = [], 12
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode("latin-1"))
            at += question[at] + 1
        notes.write(f"{'.'.join(labels)}\n")
        notes.flush()
