"""The file with the user's key: who makes it, and when it is not used."""

from __future__ import annotations

import errno
import os
import tempfile

import pytest

from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import mounts
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.rendezvous import key as keys
from torchrun_hpc.rendezvous.key import Key
from torchrun_hpc.rendezvous.proof import Secret

RANDOM = bytes(range(32))
OURS = Secret("19.0", RANDOM)


SOURCE = "--hpc_key_file=FILE"
DEFAULT, EXPLICIT = "", SOURCE


def key_at(path, source=EXPLICIT, required=""):
    return Key(KeyFile(str(path), source=source, required=required), "19.0")


def loaded(path, source=EXPLICIT):
    key = key_at(path, source)
    key.load()
    return key


def refusal(path, source=EXPLICIT, required=""):
    """Return why a launch is refused; no key is used."""
    key = key_at(path, source, required)
    with pytest.raises(LaunchError) as caught:
        key.load()
    assert (caught.value.code, caught.value.everywhere) == ("HPC238", False)
    assert caught.value.others_know  # nobody can be told without a proof
    assert key.secret == Secret("19.0")
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "key"


@pytest.fixture
def shared(monkeypatch):
    """Let all files be on a file system that nodes share, in the kernel's list."""
    text = "22 1 0:21 / / rw - nfs4 x rw\n"
    monkeypatch.setattr(keys.procfs, "read", {"/proc/self/mountinfo": text}.get)


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


@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
def test_a_folder_that_is_a_link_to_itself(file, source):
    file.parent.joinpath("config").symlink_to("config")
    made = file.parent / "config" / "key"
    assert f"unusable ({made}: Too many levels of symb" in refusal(made, source)


def a_link(file):
    write(file.with_name("real"))
    file.symlink_to("real")


NO_KEY = "it does not have 32 random bytes)"
UNUSABLE = {
    "others may read it": (
        lambda file: write(file, mode=0o640),
        "its mode is 640, not 600)",
    ),
    "others may write it": (
        lambda file: write(file, mode=0o602),
        "its mode is 602, not 600)",
    ),
    "it is empty": (lambda file: write(file, b""), NO_KEY),
    "it has only zeros": (lambda file: write(file, bytes(32)), NO_KEY),
    "it is too short": (lambda file: write(file, b"x" * 31), NO_KEY),
    "it is too long": (lambda file: write(file, b"x" * 33), NO_KEY),
    "it is a link": (a_link, "Too many levels of symbolic links"),
    "it is a link to nothing": (lambda file: file.symlink_to("no"), "Too many levels"),
    "it is a folder": (lambda file: file.mkdir(), "Is a directory"),
    "it is a pipe": (lambda file: os.mkfifo(file, 0o600), "It is not a file"),
}


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("required", ["", "--hpc_auth=require"])
@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
@pytest.mark.parametrize("case", UNUSABLE)
def test_a_key_that_cannot_be_used_is_not_no_key(file, case, source, required):
    make, reason = UNUSABLE[case]
    make(file)
    before = sorted(file.parent.iterdir())
    text = refusal(file, source, required)
    asked = source or required
    by = f" ({asked})" if asked else ""
    begin = f"this node needs a usable key{by}. Key here: unusable ({file}: {reason}"
    assert text.startswith(begin)
    assert ("Pass --hpc-key-file" in text) == (source == DEFAULT)
    assert text.endswith(", or remove this file") == (source == DEFAULT)
    assert sorted(file.parent.iterdir()) == before


@pytest.mark.usefixtures("shared")
def test_a_key_of_another_user(as_nobody):
    with tempfile.TemporaryDirectory() as folder:
        a_key_of_another_user(keys.Path(folder, "key"), as_nobody)


def a_key_of_another_user(file, as_nobody):
    file.parent.chmod(0o755)  # the fixture's folders are for root only
    write(file)
    os.chown(file, 1234, -1)
    for source in DEFAULT, EXPLICIT:
        assert "it belongs to user 1234). " in refusal(file, source)
        assert ": Permission denied). " in as_nobody(
            lambda at=source: refusal(file, at)
        )


def test_an_explicit_key_that_cannot_be_made(as_nobody):
    text = as_nobody(lambda: refusal("/etc/torchrun_hpc_test/key"))
    assert text == (
        f"this node needs a usable key ({SOURCE}). Key here: none "
        "(/etc/torchrun_hpc_test/key: Permission denied). Set a file that only you can "
        "read, or that this node can create"
    )
    assert "~nobody_at_all/key" in refusal("~nobody_at_all/key")


# --- no key at the default path -------------------------------------------------------


def reason_for_none(path):
    """Return why no key is possible; it is required if there has to be one."""
    name = loaded(path, DEFAULT).name
    assert refusal(path, DEFAULT, "--hpc_auth=require") == (
        f"this node needs a usable key (--hpc_auth=require). Key here: {name}. Pass "
        "--hpc-key-file=FILE on a shared file system"
    )
    assert str(path) in refusal(path, EXPLICIT)  # the user wants it to be there
    begin = f"none ({path}: "
    assert name.startswith(begin)
    return name[len(begin) : -1]


@pytest.mark.usefixtures("shared")
def test_a_folder_in_which_nothing_can_be_written(as_nobody):
    """It does not matter whether it can be searched, or is a folder."""
    file = "/etc/torchrun_hpc_test/key"
    assert as_nobody(lambda: reason_for_none(file)) == "Permission denied"
    assert as_nobody(lambda: reason_for_none("/root/x/key")) == "Permission denied"
    assert reason_for_none("/dev/null/.config/key") == "Not a directory"


def test_where_there_is_no_home(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda _: {}[0])
    assert "home" in reason_for_none("~/.config/torchrun_hpc/key")


def keeps_nothing_private(path, flags, mode=0o777, opened=os.open):
    """Open files on a file system that gives all of them the same mode."""
    number = opened(path, flags, mode)
    if flags & os.O_CREAT:
        os.fchmod(number, 0o755)
    return number


@pytest.mark.usefixtures("shared")
def test_a_file_system_that_keeps_nothing_private(file, monkeypatch):
    monkeypatch.setattr(os, "open", keeps_nothing_private)
    assert reason_for_none(file) == "its mode is 755, not 600"
    assert [*file.parent.iterdir()] == []


@pytest.mark.usefixtures("shared")
def test_a_file_system_without_links(file, monkeypatch):
    def link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    assert reason_for_none(file) == "Operation not permitted"
    assert [*file.parent.iterdir()] == []


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_of_others_is_no_reason_for_none(file, mode):
    """Who removes the key does not get a node without a proof."""
    assert loaded(file, DEFAULT).secret == Secret("19.0")  # one that is not shared
    file.parent.chmod(mode)
    text = refusal(file, DEFAULT)
    assert "nodes do not share its file system (" in text
    assert "; others can write to its folder). " in text
    write(file)
    assert loaded(file, DEFAULT).secret == OURS


def test_a_folder_that_another_user_has_replaced(file):
    """Who can write to a folder above it leaves a link to one without a key."""
    file.parent.rmdir()
    file.parent.symlink_to("/")
    assert loaded(file, DEFAULT).secret == Secret("19.0")  # the link is ours
    os.chown(file.parent, 1234, -1, follow_symlinks=False)
    assert "; others can write to its folder). " in refusal(file, DEFAULT)


def test_a_folder_that_belongs_to_somebody_else(file):
    file.parent.chmod(0o755)
    os.chown(file.parent, 1234, -1)
    assert "; others can write to its folder). " in refusal(file, DEFAULT)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
def test_a_key_that_somebody_removes_is_made_again(file, source):
    before = loaded(file, source).secret
    file.unlink()
    assert loaded(file, source).secret != before
    assert loaded(file, source).secret == Secret("19.0", file.read_bytes())


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("required", ["", "--hpc_auth=require"])
@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
def test_a_dry_run_makes_no_key(file, source, required):
    made = file.parent / "torchrun_hpc" / "key"
    key = Key(KeyFile(str(made), source, required, may_make=False), "19.0")
    assert key.load()  # a launch would have one
    assert (key.secret, [*file.parent.iterdir()]) == (Secret("19.0"), [])
    assert key.name == f"none yet ({made}: a launch creates it)"
    made.parent.mkdir()
    write(made)
    assert key.attempt() is None
    assert (key.secret, key.name) == (OURS, f"{made} (fa4e5cc0)")


# --- what may pass --------------------------------------------------------------------

MEMORY = "/proc/self/mem"  # it cannot be read from the start, and is private


@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
def test_a_disk_that_has_failed(monkeypatch, source):
    monkeypatch.setattr(keys, "LATE", 0)
    assert "Input/output error). " in refusal(MEMORY, source)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
@pytest.mark.parametrize("where", ["open", "link"])
def test_a_server_that_works_again(file, monkeypatch, source, where):
    """The file may be there, so none is made instead of it, and nobody is refused."""
    calls, real = [], getattr(os, where)

    def fail_first(*args, **more):
        if str(args[-1] if where == "link" else args[0]) == str(file):
            calls.append(args)
            if len(calls) < 4:
                raise OSError([errno.EIO, errno.ESTALE][len(calls) % 2], "later")
        return real(*args, **more)

    monkeypatch.setattr(os, where, fail_first)
    if where == "open":
        write(file)
    key = loaded(file, source)
    assert key.secret == Secret("19.0", file.read_bytes())
    assert [*file.parent.iterdir()] == [file]
    assert len(calls) >= 4


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
        key.attempt()
        assert key.secret == before
        assert not key.name.startswith("none")


def test_who_has_no_key_looks_again(file):
    """Another node may have made it meanwhile. What cannot be used is as nothing."""
    key = loaded(file, DEFAULT)
    file.mkdir()
    key.attempt()
    name = f"unusable ({file}: Is a directory)"
    assert (key.secret, key.name) == (Secret("19.0"), name)
    file.rmdir()
    write(file)
    key.attempt()
    assert (key.secret, key.name) == (OURS, f"{file} (fa4e5cc0)")


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


@pytest.mark.usefixtures("shared")
def test_a_default_key_is_made_where_nodes_share_it(file):
    assert loaded(file, DEFAULT).secret == Secret("19.0", file.read_bytes())


def test_a_default_key_is_not_made_elsewhere(file):
    kind = mounts.file_system(file.resolve(), keys.procfs.read("/proc/self/mountinfo"))
    name = loaded(file, DEFAULT).name
    assert name == f"none ({file}: nodes do not share its file system ({kind}))"
    write(file)  # but it is read anywhere
    assert loaded(file, DEFAULT).secret == OURS
