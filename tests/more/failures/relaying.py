"""Starts programs whose stderr is passed on, as an agent does it.

    python relaying.py SECONDS PROGRAM...     (HIDDEN=1: nothing is passed on)

It waits for the programs, and prints as JSON why stderr is not read, and for each
program its exit code, and the end of what it wrote. For the rest it waits SECONDS.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from torchrun_hpc.failures.relay import Relay

relay = Relay()
children = [
    relay.start(
        lambda stderr, program=program: subprocess.Popen(
            [sys.executable, "-c", program], stderr=stderr, start_new_session=True
        ),
        is_shown="HIDDEN" not in os.environ,
    )
    for program in sys.argv[2:]
]
codes = [child.wait() for child in children]
ends = [
    relay.end_of(child.pid) if relay.reads(child.pid) else (b"", 0)
    for child in children
]
found = {
    "unread": relay.unread,
    "codes": codes,
    "ends": [end.decode("latin-1") for end, _ in ends],
    "failed": [failed_at > 0 for _, failed_at in ends],
}
os.write(int(os.environ.get("RESULT", "1")), json.dumps(found).encode() + b"\n")
relay.close(float(sys.argv[1]))
