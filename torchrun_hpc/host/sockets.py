"""Unix sockets with abstract names, which any user of this node can take.

The read-ahead imports this module at the very start, so it imports little.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
from contextlib import suppress

from torchrun_hpc import limits, waiting


def user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 3 * 4)
    return int(struct.unpack("3i", packed)[1])  # pid, uid, gid: unix(7)


def hold(what: str) -> socket.socket:
    """Let only one of this user's processes on this node do something.

    This process gets a socket, which holds a name until it is closed. ``what`` names
    the activity. If another user has the name, every process gets a socket.

    Raises:
        BlockingIOError: Another process does it.
    """
    digest = hashlib.sha256(f"{os.getuid()} {what}".encode(errors="replace"))
    holder, name = socket.socket(socket.AF_UNIX), f"\0torchrun_hpc.{digest.hexdigest()}"
    users: list[int] = []

    def is_decided() -> bool:
        with suppress(OSError):
            holder.bind(name)
            holder.listen(4096)  # nobody accepts them
            return True
        with suppress(OSError), socket.socket(socket.AF_UNIX) as asking:
            asking.settimeout(0)  # another user may never accept
            asking.connect(name)
            users.append(user_of(asking))
        return bool(users)

    waiting.until(is_decided, limits.LISTEN_TIMEOUT)
    if os.getuid() in users:
        holder.close()
        raise BlockingIOError(errno.EAGAIN, f"another process does it: {what}")
    return holder
