"""The end of an exchange with a process manager (PMI-1), after a process has ended.

The arguments are two descriptors: of the connection to the manager, and of the process
(`os.pidfd_open`). If the process has called MPI_Finalize, the manager has closed the
connection.
"""

import os
import select
import sys

manager, process = map(int, sys.argv[1:])
poll = select.poll()
poll.register(manager, 0)
poll.register(process, select.POLLIN)
if manager not in dict(poll.poll()):
    os.write(manager, b"cmd=finalize\n")
    os.read(manager, 1000)
