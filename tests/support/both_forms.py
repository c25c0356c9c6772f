"""A script that exec starts, and that a fork starts, as an agent does it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrun_hpc.errors import Setting
from torchrun_hpc.planning.workers import Preload
from torchrun_hpc.preload import SplitOff
from torchrun_hpc.preload.starter import Preloaded
from torchrun_hpc.preload.worker import end_with_parent
from torchrun_hpc.reporting import streams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO

INPUT = "one line\nand another\n"


def split_off(preload: Preload, words: Sequence[str]) -> Preloaded:
    """Let a fork server split off and import; the fork server does not return."""
    preloaded = Preloaded(preload)
    try:
        preloaded.start(words)
    except SplitOff as split:
        serve = split.serve
    else:
        return preloaded
    serve()
    raise SystemExit


def main(preparation: str, words: Sequence[str], scripts: Sequence[str] = ()) -> None:
    """Print, as JSON, what each form of each script did.

    Args:
        preparation: Python that is run before.
        words: A script, or -m and a module, and arguments.
        scripts: Texts of the script, one after the other; none if it is there.
    """
    streams.open_closed()
    # The worker's stdout, if it is not read.
    space: dict[str, Any] = {"stdout": "", "os": os}
    exec(preparation, space)  # noqa: S102
    preload = Preload(("decimal",), Setting("decimal", "--hpc-preload"))
    preloaded = split_off(preload, words)
    assert not preloaded.check(os.environ, is_reporter=True)
    command = [sys.executable, "-u", *words]
    results = []
    for number in range(len(scripts) or 1):
        if scripts:
            Path(words[-1]).write_text(scripts[number], "latin-1")
        forms = by_exec, preloaded.fork
        results.append([result(form, command, space["stdout"]) for form in forms])
    json.dump(results, sys.stdout)


def by_exec(
    command: list[str], environ: dict[str, str], stdout: IO[bytes], stderr: IO[bytes]
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=environ, stdout=stdout, stderr=stderr, start_new_session=True,
        preexec_fn=end_with_parent(os.getpid()),  # noqa: PLW1509
    )  # fmt: skip


def result(start: Any, command: list[str], stdout: str) -> list[Any]:
    """Return exit code, stdout and stderr of a worker, without addresses."""
    with tempfile.TemporaryDirectory() as folder:
        stdin, output, error = (Path(folder, name) for name in ("in", "out", "err"))
        stdin.write_text(INPUT)
        os.dup2(os.open(stdin, os.O_RDONLY), 0)
        output.touch()
        with Path(stdout or output).open("wb") as out, error.open("wb") as err:
            worker = start(command, dict(os.environ), out, err)
        worker.wait()
        texts = [path.read_text() for path in (output, error)]
    address = re.compile("0x[0-9a-f]+")
    return [worker.returncode, *(address.sub("0x", text) for text in texts)]
