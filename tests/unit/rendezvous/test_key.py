"""The file with the user's key: who makes it, and when it is not used."""

from __future__ import annotations

import os

import pytest

from torchrun_hpc.host import mounts
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.rendezvous import key as keys
from torchrun_hpc.rendezvous.key import Key
from torchrun_hpc.rendezvous.proof import Secret

RANDOM = bytes(range(32))
OURS = Secret("19.0", RANDOM)


def loaded(path, *, is_explicit=True):
    key = Key(KeyFile(str(path), is_explicit=is_explicit), "19.0")
    key.load()
    return key


@pytest.fixture
def file(tmp_path):
    return tmp_path / "key"


def write(file, content=RANDOM, mode=0o600):
    file.write_bytes(content)
    file.chmod(mode)


def test_a_key_that_is_there(file):
    write(file)
    key = loaded(file)
    assert (key.secret, key.name) == (OURS, f"{file} (fa4e5cc0)")


def test_a_key_is_made_once(file):
    old = os.umask(0)
    try:
        key = loaded(file.parent / "torchrun_hpc" / "key")
    finally:
        os.umask(old)
    made = file.parent / "torchrun_hpc" / "key"
    assert key.secret == loaded(made).secret == Secret("19.0", made.read_bytes())
    assert (len(made.read_bytes()), made.stat().st_mode & 0o777) == (32, 0o600)
    assert [*made.parent.iterdir()] == [made]
    assert loaded(file).secret != key.secret  # another one is random, too


def test_no_key_is_wanted():
    key = Key(KeyFile(), "19.0")
    key.load()
    assert (key.secret, key.name) == (Secret("19.0"), "none (--hpc-auth=none)")


def test_a_folder_that_is_a_link_to_nothing_yet(file):
    """As of a folder that is cleared now and then."""
    file.parent.joinpath("config").symlink_to("cleared/config")
    made = file.parent / "config" / "torchrun_hpc" / "key"
    assert loaded(made).secret == Secret("19.0", made.read_bytes())


def test_a_folder_that_is_a_link_to_itself(file):
    file.parent.joinpath("config").symlink_to("config")
    made = file.parent / "config" / "key"
    assert loaded(made).name == f"none ({made}: Too many levels of symbolic links)"


def a_link(file):
    write(file.with_name("real"))
    file.symlink_to("real")


UNUSABLE = {
    "others may read it": (lambda file: write(file, mode=0o640), "its mode is 640"),
    "others may write it": (lambda file: write(file, mode=0o602), "its mode is 602"),
    "it is empty": (lambda file: write(file, b""), "it does not have 32 random"),
    "it has only zeros": (lambda file: write(file, bytes(32)), "32 random bytes"),
    "it is too short": (
        lambda file: write(file, b"x" * 31),
        "32 random bytes",
    ),
    "it is too long": (lambda file: write(file, b"x" * 33), "32 random bytes"),
    "it is a link": (a_link, "Too many levels of symbolic links"),
    "it is a link to nothing": (lambda file: file.symlink_to("no"), "Too many levels"),
    "it is a folder": (lambda file: file.mkdir(), "Is a directory"),
    "it is a pipe": (lambda file: os.mkfifo(file, 0o600), "It is not a file"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_key_that_is_not_used(file, case):
    make, reason = UNUSABLE[case]
    make(file)
    before = sorted(file.parent.iterdir())
    key = loaded(file)
    assert key.secret == Secret("19.0")
    assert key.name.startswith(f"none ({file}: ")
    assert reason in key.name
    assert sorted(file.parent.iterdir()) == before


def test_a_key_of_another_user(file, as_nobody):
    file.parent.chmod(0o755)
    write(file)
    os.chown(file, 1234, -1)
    assert loaded(file).name == f"none ({file}: it belongs to user 1234)"
    assert as_nobody(lambda: loaded(file).name).endswith(": Permission denied)")


def test_a_folder_in_which_nothing_can_be_written(as_nobody):
    name = as_nobody(lambda: loaded("/etc/torchrun_hpc_test/key").name)
    assert name == "none (/etc/torchrun_hpc_test/key: Permission denied)"


def test_a_key_that_is_seen_late(file, monkeypatch):
    """Another node has made it; here it is not to be seen yet, as on NFS."""
    write(file)
    looks = []

    def open_late(path, flags, mode=0o777, opened=os.open):
        looks.append(path)
        if len(looks) < 4 and str(path) == str(file):
            raise FileNotFoundError(2, "No such file or directory")
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", open_late)
    assert loaded(file).secret == OURS


def test_a_key_stays_whatever_becomes_of_the_file(file):
    """Otherwise somebody could wait until it cannot be read, and need none."""
    key = loaded(file)
    before = key.secret
    for change in (write, type(file).unlink, type(file).mkdir):
        change(file)
        key.load()
        assert key.secret == before
        assert not key.name.startswith("none")


def test_where_there_is_no_home(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}[0])
    key = loaded("~/.config/torchrun_hpc/key")
    assert key.secret == Secret("19.0")
    assert key.name.startswith("none (~/.config/torchrun_hpc/key: ")


# --- file systems --------------------------------------------------------------------

# Lines of proc_pid_mountinfo(5); those of clusters as their documentation has them.
MOUNTS = r"""
22 1 0:21 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:22 / /home rw,relatime shared:2 - nfs4 server:/home rw,vers=4.2
24 22 0:23 / /p/home\040x rw shared:3 master:1 - gpfs home rw
25 23 0:24 / /home/me/local rw - tmpfs tmpfs rw
26 22 0:25 / /lustre rw - lustre 10.0.0.1@o2ib:/fs rw
27 22 0:26 /a /mnt rw - nfs server:/a rw
28 22 0:27 / /mnt rw - tmpfs tmpfs rw
29 22 0:28 / /ceph rw - fuse.ceph-fuse ceph-fuse rw
30 22 0:29 / /sshfs rw - fuse.sshfs me@host: rw
31 22 0:30 / /root rw - overlay overlay rw,lowerdir=/x
"""[1:]
SHARED = {
    "/home/me/.config/torchrun_hpc/key": ("nfs4", True),
    "/homes/me/key": ("ext4", False),
    "/p/home x/me/key": ("gpfs", True),
    "/home/me/local/key": ("tmpfs", False),
    "/lustre/key": ("lustre", True),
    "/mnt/key": ("tmpfs", False),  # it hides the other
    "/ceph/key": ("fuse.ceph-fuse", True),
    "/sshfs/key": ("fuse.sshfs", False),
    "/root/.config/torchrun_hpc/key": ("overlay", False),
    "/": ("ext4", False),
}


@pytest.mark.parametrize("path", SHARED)
def test_which_file_systems_nodes_share(path):
    kind = mounts.file_system(keys.Path(path), MOUNTS)
    assert (kind, kind.removeprefix("fuse.") in mounts.SHARED) == SHARED[path]


def test_a_file_system_that_is_not_known():
    assert mounts.file_system(keys.Path("/a"), "") == "unknown"


@pytest.mark.parametrize("kind", ["nfs4", "ext4"])
def test_a_default_key_is_made_only_where_nodes_share_it(file, monkeypatch, kind):
    text = f"22 1 0:21 / / rw - {kind} x rw\n"
    monkeypatch.setattr(keys.procfs, "read", {"/proc/self/mountinfo": text}.get)
    key = loaded(file, is_explicit=False)
    if kind == "nfs4":
        assert key.secret == Secret("19.0", file.read_bytes())
        return
    reason = "nodes do not share its file system (ext4)"
    assert key.name == f"none ({file}: {reason})"
    write(file)  # but it is read anywhere
    assert loaded(file, is_explicit=False).secret == OURS
