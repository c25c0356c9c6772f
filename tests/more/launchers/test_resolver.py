"""The name server does not answer, or late: a clean start is one line all the same."""

from __future__ import annotations

import contextlib
import sys

import pytest

from tests.support.cluster.commands import (
    ALL_REDUCE,
    FORMS,
    SCRIPTS,
    lines,
    read_workers,
)
from tests.support.cluster.real_job import Program, launch

NAMES = ("TORCH_CPP_LOG_LEVEL", "RES_OPTIONS")
LOGIN = "10.10.0.254"

# Seconds after which it answers; and the variables of the plan.
SILENT, SHORT = "TORCH_CPP_LOG_LEVEL=ERROR", "RES_OPTIONS=timeout:1 attempts:1"
KINDS: dict[str, tuple[str, set[str]]] = {
    "none": ("", {SILENT, SHORT}),
    "dead": ("never", {SILENT}),
    "slow": ("3", {SILENT}),
    "quick": ("0", set()),
}


@contextlib.contextmanager
def name_server(cluster, late, folder, options=""):
    """Run a name server, if `late` is set; yield `launch`'s arguments for it."""
    (folder / "nsswitch.conf").write_text("hosts: files dns\n")
    (folder / "resolv.conf").write_text(f"nameserver {LOGIN}\n" * bool(late) + options)
    binds = "; ".join(
        f"mount --bind {folder / name} /etc/{name}"
        for name in ("nsswitch.conf", "resolv.conf")
    )
    how = {"srun": ["unshare", "--mount"], "first": binds}
    if not late:
        yield how
        return
    words = [sys.executable, SCRIPTS / "nameserver.py", folder / "questions", late]
    with Program(cluster, words) as server:
        server.says("ready")
        yield how


@pytest.mark.parametrize("tasks", [1, 2], ids=["agents", "direct mode"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_clean_start_is_one_line(kind, tasks, unpadded, tmp_path):
    """Direct mode asks the name server itself, and waits only a moment."""
    late, variables = KINDS[kind]
    with name_server(unpadded, late, tmp_path) as how:
        environ = FORMS["fork"]
        done = launch(
            unpadded, tasks=tasks, script=[ALL_REDUCE], environ=environ, **how
        )
    seen = read_workers(done)
    assert len(seen) == 2 * tasks
    assert len(lines(done.stderr)) == 1
    # On a busy machine an agent imports torch for longer than the slow server takes.
    may_be_quick = kind == "slow" and tasks == 1
    for worker in seen:
        found = {f"{name}={worker[name]}" for name in NAMES if worker[name]}
        assert found == variables or (may_be_quick and not found), found


def test_it_is_not_asked_for_peers(unpadded, tmp_path):
    """Torch's store asks for the name of every peer; if DNS is slow, all wait.

    One question is left: of the client that a server is to itself. And each node asks
    once more, to find out whether there is an answer.
    """
    options = "options timeout:1 attempts:1\n"
    with name_server(unpadded, "never", tmp_path, options) as how:
        done = launch(unpadded, **how)
    assert len(read_workers(done)) == 2
    questions = (tmp_path / "questions").read_text().splitlines()
    asked = [name for name in questions if name.endswith(".arpa")]
    assert 0 < len(asked) <= 1 + 2, asked
