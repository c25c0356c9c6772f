"""The name server does not answer, or late: a clean start is one line all the same."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

import pytest
from commands import (
    ALL_REDUCE,
    ENVIRON,
    FIRST_TWO,
    FORMS,
    HPC,
    ONE_TASK,
    SCRIPTS,
    lines,
    read_workers,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from testbed import Cluster

NAMESERVER = SCRIPTS / "nameserver.py"
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
def name_server(cluster: Cluster, kind: str, folder: Path) -> Iterator[str]:
    """Run it; yield what makes it that of a node, in a shell there."""
    late, _ = KINDS[kind]
    (folder / "nsswitch.conf").write_text("hosts: files dns\n")
    (folder / "resolv.conf").write_text(f"nameserver {LOGIN}\n" if late else "")
    binds = "; ".join(
        f"mount --bind {folder / name} /etc/{name}"
        for name in ("nsswitch.conf", "resolv.conf")
    )
    if not late:
        yield binds
        return
    server = cluster.popen([sys.executable, NAMESERVER, folder / "notes", late])
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield binds
    finally:
        cluster.end(server)


@pytest.mark.parametrize(
    ("kind", "form"),
    [("none", "fork"), ("dead", "fork"), ("slow", "exec"), ("quick", "fork")],
)
def test_a_clean_start_is_one_line(
    kind: str, form: str, unpadded: Cluster, tmp_path: Path
) -> None:
    command = " ".join([*HPC, ALL_REDUCE])
    with name_server(unpadded, kind, tmp_path) as binds:
        done = unpadded.srun(
            *FIRST_TWO, ONE_TASK, "unshare", "--mount", "sh", "-c",
            f"{binds}; exec {command}", env=ENVIRON | FORMS[form],
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(lines(done.stderr)) == 1, done.stderr
    seen = read_workers(done)
    assert len(seen) == 2, done.stdout
    _, variables = KINDS[kind]
    for worker in seen:
        found = {f"{name}={worker[name]}" for name in NAMES if worker[name]}
        # A busy machine imports torch for longer than the slow one takes to answer.
        assert found == variables or (kind == "slow" and not found), found
