"""Start a script by exec and by fork, as an agent does, and print what each did.

    python both_forms.py PREPARATION WORD ...

PREPARATION is run before; the words are a script, or -m and a module, and arguments.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from torchrun_hpc.launching.preloading import Preloaded
from torchrun_hpc.planning.inputs import Preload
from torchrun_hpc.reporting import streams
from torchrun_hpc.setting import Setting
from torchrun_hpc.worker import SplitOff
from torchrun_hpc.worker.parent import end_with_parent

INPUT = "one line\nand another\n"


def main():
    streams.open_closed()
    preparation, *words = sys.argv[1:]
    space = {"stdout": "", "os": os}  # stdout: of the worker, if it is not to be read
    exec(preparation, space)  # noqa: S102
    preload = Preload(("decimal",), Setting("decimal", "--hpc-preload"))
    preloaded = Preloaded(preload)
    try:
        preloaded.start(words)
    except SplitOff as split:
        serve = split.serve
    else:
        preloaded.check(os.environ, is_reporter=True)
        assert preloaded.problem is None, preloaded.problem
        command = [sys.executable, "-u", *words]
        forms = [by_exec, preloaded.fork]
        json.dump([result(f, command, space["stdout"]) for f in forms], sys.stdout)
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
        worker.wait(60)
        texts = [path.read_text() for path in (output, error)]
    address = re.compile("0x[0-9a-f]+")
    return [worker.returncode, *(address.sub("0x", text) for text in texts)]


if __name__ == "__main__":
    main()
