"""A name server that notes each question: nameserver.py FILE [SECONDS].

After so many seconds it answers that there is no such name; without, never.
"""

from __future__ import annotations

import socket
import sys
import threading
from pathlib import Path

with (
    Path(sys.argv[1]).open("w", encoding="utf-8") as notes,
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened,
):
    opened.bind(("", 53))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        question, client = opened.recvfrom(512)
        labels, at = [], 12
        while question[at]:
            labels.append(question[at + 1 : at + 1 + question[at]].decode("latin-1"))
            at += question[at] + 1
        notes.write(f"{'.'.join(labels)}\n")
        notes.flush()
        if len(sys.argv) > 2 and sys.argv[2] != "never":
            # NXDOMAIN, with the question as it was, and without what follows it.
            answer = question[:2] + b"\x81\x83" + question[4:6] + bytes(6)
            answer += question[12 : at + 5]
            timer = threading.Timer(float(sys.argv[2]), opened.sendto, [answer, client])
            timer.daemon = True
            timer.start()
