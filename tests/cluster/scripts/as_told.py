"""Runs a command, and then the line that its message tells to type.

    as_told.py CODE COMMAND...

CODE is that of the message. Of two forms of a line that for Open MPI is taken if its
mpirun is in this folder; NODES are the hosts of the file HOSTFILE. What the line prints
is printed, and the line itself in front of that, to stderr.
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
said = re.search(f"torchrun_hpc: .*{code} .*", text)
if said is None:
    sys.exit(f"no {code} in:\n{text}")
told = re.search(r"(?:ype|on each node|for all of them): (.*?)(?:   \(|$)", said[0])
assert told, said[0]
line = told[1]
other = re.search(r"\(with Open MPI: (.*?)\)", said[0])
if other and Path(shutil.which("mpirun") or "").parent == Path.cwd():
    line = other[1]
if "NODES" in line:
    hosts = {host.split(":")[0] for host in Path("HOSTFILE").read_text().split()}
    line = line.replace("NODES", str(len(hosts)))
print(line, file=sys.stderr, flush=True)
os.execvp("sh", ["sh", "-c", line])  # noqa: S606
