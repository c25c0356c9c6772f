"""Runs a command, and then the line that its message suggests.

    as_suggested.py CODE COMMAND...

CODE is the message's code. A second line to copy is for Open MPI. It runs if Open MPI's
mpirun is in this folder. NODES in the line is replaced by the number of hosts in the
file HOSTFILE. The line is printed to stderr before it runs.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

code, *command = sys.argv[1:]
first = subprocess.run(
    command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False
)
text = first.stderr.decode()
message = re.search(rf"torchrun_hpc\b.*\[{code}\]: .*\n((?:    .*\n)+)", text)
if message is None:
    sys.exit(f"no {code} with a line to copy in:\n{text}")
line, *others = (each.strip() for each in message[1].splitlines())
if others and Path(shutil.which("mpirun") or "").parent == Path.cwd():
    (line,) = others
if "NODES" in line:
    hosts = {host.split(":")[0] for host in Path("HOSTFILE").read_text().split()}
    line = line.replace("NODES", str(len(hosts)))
print(line, file=sys.stderr, flush=True)
os.execvp("sh", ["sh", "-c", line])  # noqa: S606
