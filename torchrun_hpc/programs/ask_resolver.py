"""A query for the name of an address, like torch's; the exit code is the result.

It is 0 for an answer, 3 if no name server is reached, and 4 if none answers.
"""

import socket
import sys


def is_reached(server: str) -> bool:
    """Return whether a name server is reached, even if it is slow."""
    family = socket.AF_INET6 if ":" in server else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.settimeout(1)
        try:
            asking.connect((server, 53))
            # A query for the root's name servers: RFC 1035, 4.1.
            asking.send(b"\0\1\1\0\0\1" + bytes(6) + b"\0\0\2\0\1")
            asking.recv(512)
        except TimeoutError:
            return True
        except OSError:
            return False
    return True


try:
    socket.getnameinfo((sys.argv[1], 0, 0, 0), socket.NI_NUMERICSERV)
except socket.gaierror as error:
    if error.errno != socket.EAI_AGAIN:
        sys.exit(0)
else:
    sys.exit(0)
try:
    with open("/etc/resolv.conf", encoding="utf-8", errors="replace") as file:
        words = [line.split() for line in file]
except OSError:
    words = []
servers = [line[1] for line in words if line[:1] == ["nameserver"] and line[1:]]
sys.exit(4 if any(map(is_reached, servers or ["127.0.0.1"])) else 3)
