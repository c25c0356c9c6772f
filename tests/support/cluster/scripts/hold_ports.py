"""Take all ports on which the head of this step would listen, and become a command."""

import os
import socket
import sys

from torchrun_hpc.planning.head_node import ports_of

held = []
launch_id = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
for port in ports_of(launch_id)[0]:
    held.append(socket.create_server(("", port)))
    held[-1].set_inheritable(True)
os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606
