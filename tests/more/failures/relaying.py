"""Starts programs whose stderr is passed on, as an agent does it.

    python relaying.py SECONDS PROGRAM...

It waits for the programs, and prints as JSON why stderr is not read, and for each
program its exit code, and the end of what it wrote. For the rest it waits SECONDS.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

from torchrun_hpc.failures.relay import Relay

relay = Relay()


def start(program, stderr):
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, stderr=stderr, start_new_session=True)


children = [relay.start(partial(start, program)) for program in sys.argv[2:]]
codes = [child.wait() for child in children]
ends = [
    relay.end_of(child.pid)[0].decode("latin-1") if relay.reads(child.pid) else ""
    for child in children
]
print(json.dumps({"unread": relay.unread, "codes": codes, "ends": ends}), flush=True)
relay.close(float(sys.argv[1]))
