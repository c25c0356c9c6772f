"""A query for the name of an address, like torch's; the exit code is the result.

It is 0 for an answer, and 4 if no name server answers.
"""

import socket
import sys

try:
    socket.getnameinfo((sys.argv[1], 0, 0, 0), socket.NI_NUMERICSERV)
except socket.gaierror as error:
    sys.exit(4 * (error.errno == socket.EAI_AGAIN))
