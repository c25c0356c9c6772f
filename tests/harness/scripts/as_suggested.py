"""Runs a command, and then the line that its message suggests.

    as_suggested.py CODE COMMAND...

CODE is that of the message. If the message has a second line for Open MPI, that one is
run if Open MPI's mpirun is in this folder. NODES in it is replaced by the number of
hosts in the file HOSTFILE. The line is printed to stderr before it runs.
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
message = re.search(f"torchrun_hpc: .*{code} .*", text)
if message is None:
    sys.exit(f"no {code} in:\n{text}")
suggested = re.search(
    r"(?:ype|on each node|for all of them): (.*?)(?:   \(|$)", message[0]
)
assert suggested, message[0]
line = suggested[1]
other = re.search(r"\(with Open MPI: (.*?)\)", message[0])
if other and Path(shutil.which("mpirun") or "").parent == Path.cwd():
    line = other[1]
if "NODES" in line:
    hosts = {host.split(":")[0] for host in Path("HOSTFILE").read_text().split()}
    line = line.replace("NODES", str(len(hosts)))
print(line, file=sys.stderr, flush=True)
os.execvp("sh", ["sh", "-c", line])  # noqa: S606
