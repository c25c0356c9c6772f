"""A script is started by exec and by fork, as an agent does it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from torchrun_hpc.errors import Setting
from torchrun_hpc.planning.workers import Preload
from torchrun_hpc.preload import SplitOff
from torchrun_hpc.preload.starter import Preloaded
from torchrun_hpc.preload.worker import end_with_parent
from torchrun_hpc.reporting import streams

INPUT = "one line\nand another\n"


def main(preparation, words, scripts=()):
    """Print, as JSON, what each form of each script did.

    Args:
        preparation: Python that is run before.
        words: A script, or -m and a module, and arguments.
        scripts: Texts of the script, one after the other; none if it is there.
    """
    streams.open_closed()
    space = {"stdout": "", "os": os}  # stdout: of the worker, if it is not to be read
    exec(preparation, space)  # noqa: S102
    preloaded = Preloaded(Preload(("decimal",), Setting("decimal", "--hpc-preload")))
    try:
        preloaded.start(words)
    except SplitOff as split:
        serve = split.serve
    else:
        assert not preloaded.check(os.environ, is_reporter=True)
        command = [sys.executable, "-u", *words]
        found = []
        for text in scripts or [None]:
            if text is not None:
                Path(words[-1]).write_text(text, "latin-1")
            forms = by_exec, preloaded.fork
            found.append([result(form, command, space["stdout"]) for form in forms])
        json.dump(found, sys.stdout)
        return
    serve()


def by_exec(command, environ, stdout, stderr):
    return subprocess.Popen(
        command, env=environ, stdout=stdout, stderr=stderr, start_new_session=True,
        preexec_fn=end_with_parent(os.getpid()),  # noqa: PLW1509
    )  # fmt: skip


def result(start, command, stdout):
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
