"""The file with the user's key, and who proves to belong to a launch."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import hypothesis
import pytest
from hypothesis import strategies

from tests.support.loopback import JOB
from tests.support.simulated_job import request_of
from torchrun_hpc import limits, wire
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.host import procfs
from torchrun_hpc.planning.meeting import KeyFile
from torchrun_hpc.rendezvous.key import (
    CALLER,
    LISTENER,
    Hello,
    Key,
    Secret,
    UnprovedError,
)
from torchrun_hpc.wire import WireError

RANDOM = bytes(range(32))
OURS, NO_KEY = Secret(JOB, RANDOM), Secret(JOB)

SOURCE = "--hpc_key_file=FILE"
DEFAULT, EXPLICIT = "", SOURCE


def key_at(path, source=EXPLICIT, required=""):
    return Key(KeyFile(str(path), source=source, required=required), JOB)


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
    assert key.secret == NO_KEY
    return str(caught.value)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "key"


@pytest.fixture
def shared(monkeypatch):
    """Let all files be on a file system that nodes share, in the kernel's list."""
    text = "22 1 0:21 / / rw - nfs4 x rw\n"
    monkeypatch.setattr(procfs, "read", {"/proc/self/mountinfo": text}.get)


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
    new = file.parent / "torchrun_hpc" / "key"
    assert key.secret == loaded(new).secret == Secret(JOB, new.read_bytes())
    assert (len(new.read_bytes()), new.stat().st_mode & 0o777) == (32, 0o600)
    assert [*new.parent.iterdir()] == [new]
    assert loaded(file).secret != key.secret  # another one is also random


def test_no_key_is_wanted():
    key = Key(KeyFile(), JOB)
    key.load()
    assert (key.secret, key.name) == (NO_KEY, "none (--hpc-auth=none)")


def test_a_folder_that_is_a_link_to_nothing_yet(file):
    """The folder may be cleared now and then."""
    file.parent.joinpath("config").symlink_to("cleared/config")
    new = file.parent / "config" / "torchrun_hpc" / "key"
    assert loaded(new).secret == Secret(JOB, new.read_bytes())


@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
def test_a_folder_that_is_a_link_to_itself(file, source):
    file.parent.joinpath("config").symlink_to("config")
    new = file.parent / "config" / "key"
    assert f"unusable ({new}: Too many levels of symb" in refusal(new, source)


def a_link(file):
    write(file.with_name("real"))
    file.symlink_to("real")


NOT_RANDOM = "it does not have 32 random bytes)"
UNUSABLE = {
    "others may read it": (lambda file: write(file, mode=0o640), "its mode is 640, "),
    "others may write it": (lambda file: write(file, mode=0o602), "its mode is 602, "),
    "it is empty": (lambda file: write(file, b""), NOT_RANDOM),
    "it has only zeros": (lambda file: write(file, bytes(32)), NOT_RANDOM),
    "it is too short": (lambda file: write(file, b"x" * 31), NOT_RANDOM),
    "it is too long": (lambda file: write(file, b"x" * 33), NOT_RANDOM),
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
@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
def test_a_key_of_another_user(as_nobody, source):
    # The folders of fixtures are for root only.
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "key")
        file.parent.chmod(0o755)
        write(file)
        os.chown(file, 1234, -1)
        assert "it belongs to user 1234). " in refusal(file, source)
        text = as_nobody(lambda: refusal(file, source))
        assert ": Permission denied). " in text


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
    monkeypatch.setattr("pwd.getpwuid", mock.Mock(side_effect=KeyError))
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
    fault = PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "link", mock.Mock(side_effect=fault))
    assert reason_for_none(file) == "Operation not permitted"
    assert [*file.parent.iterdir()] == []


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_of_others_is_no_reason_for_none(file, mode):
    """Who removes the key does not get a node without a proof."""
    assert loaded(file, DEFAULT).secret == NO_KEY  # one that is not shared
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
    assert loaded(file, DEFAULT).secret == NO_KEY  # the link is ours
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
    assert loaded(file, source).secret == Secret(JOB, file.read_bytes())


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("required", ["", "--hpc_auth=require"])
@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
def test_a_dry_run_makes_no_key(file, source, required):
    new = file.parent / "torchrun_hpc" / "key"
    key = Key(KeyFile(str(new), source, required, may_make=False), JOB)
    assert key.load()  # a launch would have one
    assert (key.secret, [*file.parent.iterdir()]) == (NO_KEY, [])
    assert key.name == f"none yet ({new}: a launch creates it)"
    new.parent.mkdir()
    write(new)
    assert key.attempt() is None
    assert (key.secret, key.name) == (OURS, f"{new} (fa4e5cc0)")


# --- what may pass --------------------------------------------------------------------

MEMORY = "/proc/self/mem"  # it cannot be read from the start, and is private


@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
def test_a_disk_that_has_failed(monkeypatch, source):
    monkeypatch.setattr(limits, "KEY_FILE_TIMEOUT", 0)
    assert "Input/output error). " in refusal(MEMORY, source)


@pytest.mark.usefixtures("shared")
@pytest.mark.parametrize("source", [DEFAULT, EXPLICIT])
@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        *(("open", [errno.ESTALE, errno.EIO]), ("link", [errno.ESTALE, errno.EIO])),
        ("open", [errno.ENOENT]),  # on NFS, another node's file may be seen late
    ],
)
def test_a_server_that_works_again(file, monkeypatch, source, call, numbers):
    """The file may be there, so none is made instead of it, and nobody is refused."""
    real, errors = getattr(os, call), [*numbers * 3][:3]

    def fail_first(*args, **more):
        if errors and str(args[-1] if call == "link" else args[0]) == str(file):
            raise OSError(errors.pop(), "later")
        return real(*args, **more)

    monkeypatch.setattr(os, call, fail_first)
    if call == "open":
        write(file)
    key = loaded(file, source)
    assert key.secret == Secret(JOB, file.read_bytes())
    assert [*file.parent.iterdir()] == [file]
    assert not errors


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
    """Another node may have made it meanwhile. An unusable file is no key."""
    key = loaded(file, DEFAULT)
    file.mkdir()
    key.attempt()
    name = f"unusable ({file}: Is a directory)"
    assert (key.secret, key.name) == (NO_KEY, name)
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
    kind = procfs.file_system(Path(path), MOUNTS)
    assert (kind, kind.removeprefix("fuse.") in procfs.SHARED) == SHARED[path]


def test_an_unknown_file_system():
    assert procfs.file_system(Path("/a"), "") == "unknown"


@pytest.mark.usefixtures("shared")
def test_a_default_key_is_made_where_nodes_share_it(file):
    assert loaded(file, DEFAULT).secret == Secret(JOB, file.read_bytes())


def test_a_default_key_is_not_made_elsewhere(file):
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8")
    kind = procfs.file_system(file.resolve(), mounts)
    name = loaded(file, DEFAULT).name
    assert name == f"none ({file}: nodes do not share its file system ({kind}))"
    write(file)  # but it is read anywhere
    assert loaded(file, DEFAULT).secret == OURS


# --- the proof ------------------------------------------------------------------------

DIALLED = ("10.20.0.1", 20001)
ASKED = request_of(1)

# The number of tried handshakes. By hand, 100,000 were tried.
TRIES = 2000


def as_received(message):
    """Return a message as the other side reads it."""
    (received,) = wire.Lines(4096).feed(wire.to_line(message))
    return received


def listening(secret=OURS, address=DIALLED[0], port=DIALLED[1]):
    steps = secret.listen(address, port)
    next(steps)
    return steps


def admitted(steps, line):
    """Send the last line; return the request that was admitted."""
    with pytest.raises(StopIteration) as proved:
        steps.send(as_received(line))
    return proved.value.value


def meet(caller, listener, to=DIALLED):
    """Let a caller meet a listener; return the request that was admitted."""
    calls = caller.call(to, ASKED)
    answer = listener.send(as_received(next(calls)))
    return admitted(listener, calls.send(as_received(answer)))


def test_a_request_is_admitted_as_it_was_sent():
    assert meet(OURS, listening()) == ASKED
    assert meet(NO_KEY, listening(NO_KEY)) == ASKED
    assert meet(OURS, listening(address="::")) == ASKED


def test_a_vector():
    """The proof of known values stays the same."""
    secret = Secret("123456.0", bytes(range(32)))
    hello = Hello("00" * 16, ("10.20.0.1", 26058), "22" * 32)
    assert secret.proof(LISTENER, hello, "11" * 16) == (
        "6edf2b0e7214070b76106b021b53c45482d380eb51ed4e9b106634dc76bd2ec2"
    )
    assert secret.proof(CALLER, hello, "11" * 16) == (
        "c93227048e10debebc1546001378694601ddc6031b7287501d236106028bcd8c"
    )


OTHERS = {
    "another key": Secret(JOB, b"x" * 32),
    "another launch": Secret("20.0", RANDOM),
    "no key": NO_KEY,
}


@pytest.mark.parametrize("case", OTHERS)
def test_two_who_do_not_have_the_same_secret(case):
    other = OTHERS[case]
    for caller, listener in ((OURS, other), (other, OURS)):
        with pytest.raises(UnprovedError):
            meet(caller, listening(listener))


@pytest.mark.parametrize("case", OTHERS)
def test_a_caller_that_needs_no_proof_of_the_other_side(case):
    calls, steps = OTHERS[case].call(DIALLED, ASKED), listening()
    hello = next(calls)
    nonce = steps.send(as_received(hello))["nonce"]
    said = Hello(hello["nonce"], DIALLED, hello["request"])
    answer = {"nonce": nonce, "proof": OTHERS[case].proof(LISTENER, said, nonce)}
    with pytest.raises(WireError):
        steps.send(as_received(calls.send(answer)))


@pytest.mark.parametrize(
    "to", [("10.20.0.1", 20002), ("10.20.0.2", 20001), ("", 20001), ("10.20.0.1", 0)]
)
def test_a_caller_that_has_dialled_somebody_else(to):
    """Who listens there has passed its lines on."""
    with pytest.raises(WireError):
        meet(OURS, listening(), to)


def test_a_proof_counts_once_and_for_its_own_side():
    calls = OURS.call(DIALLED, ASKED)
    hello, steps = next(calls), listening()
    challenge = steps.send(as_received(hello))
    line = calls.send(as_received(challenge))
    assert admitted(steps, line) == ASKED
    again = listening()
    assert again.send(as_received(hello)) != challenge
    with pytest.raises(WireError):
        again.send(as_received(line))
    reflected = listening()
    answer = reflected.send(as_received(hello))
    with pytest.raises(WireError):
        reflected.send({**ASKED, "proof": answer["proof"]})


@pytest.mark.parametrize(
    "change", [{"rank": 2}, {"failed": {}}, {"asks": True}, {"proof": None}]
)
def test_a_request_that_somebody_has_changed(change):
    calls, steps = OURS.call(DIALLED, ASKED), listening()
    answer = steps.send(as_received(next(calls)))
    line = calls.send(as_received(answer))
    with pytest.raises(WireError):
        steps.send(as_received({**line, **change}))


def test_an_answer_does_not_tell_jobs_apart():
    """Nor ids, states, releases, or whether there is a key at the other side."""
    answers = []
    for launch, key in (("19.0", b"k"), ("20.0", b"k"), ("19.0", b"x")):
        steps = listening(Secret(launch, key))
        answers.append(steps.send(as_received(next(OURS.call(DIALLED, ASKED)))))
    forms = [{name: len(text) for name, text in each.items()} for each in answers]
    assert forms == [{"nonce": 32, "proof": 64}] * 3
    assert len({each["proof"] for each in answers}) == 3


def test_a_caller_says_nothing_of_itself_before():
    hello = next(OURS.call(DIALLED, ASKED))
    assert hello.keys() == {"nonce", "to", "request"}
    for value in ASKED.values():
        assert type(value) is not str or len(value) < 3 or value not in str(hello)


# --- whatever comes ------------------------------------------------------------------

TEXTS = strategies.text(max_size=64)
HELLOS = strategies.fixed_dictionaries(
    {
        "nonce": TEXTS,
        "to": strategies.just([*DIALLED])
        | strategies.tuples(TEXTS, strategies.integers()),
        "request": TEXTS,
    }
)
LASTS = strategies.dictionaries(strategies.just("proof") | TEXTS, TEXTS, max_size=3)
VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 20001, 1.5, 2**63, "", "0", "x" * 64, "\ud800", "é" * 64),
    *([], {}, [1, 2], ["10.20.0.1", 20001], {"a": 1}, [["10.20.0.1", 20001]]),
)


def mutated(draw, message, others):
    """Return a message in which something is different, or another one."""
    if draw.random() < 0.1:
        return draw.choice(others)
    name = draw.choice([*message])
    text = str(message[name])
    place = draw.randrange(len(text) + 1)
    changes = (
        *(
            text[:place] + draw.choice("0123456789abcdef") + text[place + 1 :],
            text + "0",
        ),
        *(text[:place], text.upper(), text[::-1], draw.choice(VALUES)),
    )
    changed = {**message, name: draw.choice(changes)}
    if draw.random() < 0.2:
        del changed[name]
    return changed


def examined(hello, prove):
    """Return the request that a listener admits; None if there is none.

    Args:
        hello: The first line.
        prove: Returns the last one, from the listener's answer.
    """
    steps = listening()
    try:
        answer = steps.send(prove(steps.send(hello)))
    except (WireError, UnprovedError):
        return None
    except StopIteration as proved:
        return proved.value
    raise AssertionError(answer)


def test_no_handshake_is_admitted_in_which_anything_differs():
    draw = random.Random(40)  # noqa: S311 - no secret
    calls, steps = OURS.call(DIALLED, ASKED), listening()
    others = [next(calls)]
    others.append(steps.send(others[0]))
    others += [calls.send(others[1]), {}, ASKED]
    same = 0
    for turn in range(TRIES):
        calls = OURS.call(DIALLED, ASKED)
        sent = as_received(next(calls))
        differs: list[bool] = []

        def prove(answer, calls=calls, turn=turn, differs=differs):
            line = as_received(calls.send(answer))
            changed = mutated(draw, line, others) if turn % 2 else line
            differs.append(wire.to_line(changed) != wire.to_line(line))  # True == 1
            return changed

        hello = sent if turn % 2 else mutated(draw, sent, others)
        request = examined(hello, prove)
        is_same = hello == sent and differs == [False]
        assert request == (ASKED if is_same else None)
        same += is_same
    assert 0 < same < TRIES / 5  # now and then, a change was none


@hypothesis.given(HELLOS, LASTS)
def test_nothing_at_random_is_admitted(first, last):
    assert examined(first, lambda _: last) is None
