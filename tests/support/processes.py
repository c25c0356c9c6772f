"""Programs that a test starts on this machine, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from tests.support import ROOT
from tests.support.patience import OWN, PATIENCE, without_waits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from typing_extensions import Self

# Schedulers, launchers and users set these, which would decide what is tested.
_FOREIGN = (
    *("SLURM", "PET_", "OMP_", "GLOO_", "NCCL_", "TORCH", "MASTER_", "MKL_", "PYTHON"),
    *("RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "CUDA_VISIBLE", "LOGLEVEL"),
    *("SYSTEMNAME", "PMI", "OMPI_", "PALS_", "PBS_"),
)


# The launcher sets these if no name server answers. A test that compares whole
# environments sets them itself, so that its result does not depend on a name server.
ANY_RESOLVER = {"TORCH_CPP_LOG_LEVEL": "ERROR", "RES_OPTIONS": "timeout:1 attempts:1"}


def clean_environ() -> dict[str, str]:
    """Return this environment as it is outside of any job, with this checkout."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    return {**kept, "PYTHONPATH": str(ROOT)}


@dataclass(frozen=True)
class Result:
    """The end of a program.

    Attributes:
        code: Exit code.
        out: The text on stdout.
        err: The text on stderr.
    """

    code: int
    out: str
    err: str

    @property
    def own_lines(self) -> list[str]:
        """The lines that torchrun_hpc wrote, without those that depend on load."""
        own = (line for line in self.err.splitlines() if OWN.match(line))
        return without_waits(own)


class RunningProgram:
    """A program that runs on this machine, in a process group of its own.

    Leave its context to end the whole group. Its streams are not buffered.

    Args:
        command: The program and its arguments.
        environ: All its variables; by default those outside of any job.
        cwd: Working directory.
        stdin: As in `subprocess.Popen`, but empty by default.
        stdout: As in `subprocess.Popen`, but a pipe by default.
        stderr: As in `subprocess.Popen`, but a pipe by default.
    """

    def __init__(  # noqa: PLR0913 - as `subprocess.Popen`
        self,
        command: Iterable[str | Path],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int | IO[bytes] = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] | None = subprocess.PIPE,
    ) -> None:
        self.process = subprocess.Popen(
            [str(word) for word in command],
            bufsize=0,
            env=clean_environ() if environ is None else environ,
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def stdin(self) -> IO[bytes]:
        """The pipe to its standard input."""
        return _pipe(self.process.stdin)

    @property
    def stdout(self) -> IO[bytes]:
        """The pipe from its standard output."""
        return _pipe(self.process.stdout)

    @property
    def stderr(self) -> IO[bytes]:
        """The pipe from its standard error."""
        return _pipe(self.process.stderr)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def line(self) -> str:
        """Wait for a line of its standard output; fail if it ends before."""
        text = self.stdout.readline().decode()
        assert text, self.result()
        return text.rstrip("\n")

    def send(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self) -> int:
        """Wait for its end; return its exit code."""
        return self.process.wait(PATIENCE)

    def result(self, limit: float = PATIENCE) -> Result:
        """Wait for its end, at most so many seconds; return all that is unread."""
        out, err = self.process.communicate(timeout=limit)
        texts = (text.decode() if text else "" for text in (out, err))
        return Result(self.process.returncode, *texts)

    def end(self) -> None:
        """Kill what is left of its group, and close the pipes."""
        end_group(self.pid)
        with contextlib.suppress(BrokenPipeError), self.process:
            self.process.wait(PATIENCE)


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None, "the stream is no pipe"
    return stream


def end_group(leader: int) -> None:
    """Kill what is left of a process group that we started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def run(
    command: Iterable[str | Path],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    limit: float = PATIENCE,
) -> Result:
    """Run a program to its end, as `RunningProgram` starts it."""
    with RunningProgram(command, environ=environ, cwd=cwd) as program:
        return program.result(limit)


def run_python(
    *args: str | Path,
    cwd: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    path: Iterable[str | Path] = (),
    before: Iterable[str | Path] = (),
) -> Result:
    """Run Python on this checkout to its end.

    Args:
        args: Its arguments.
        cwd: Working directory.
        environ: All its variables but PYTHONPATH; by default those outside of any job.
        path: Folders that are searched before the checkout.
        before: A command that starts it.
    """
    variables = {
        **(clean_environ() if environ is None else environ),
        "PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]),
    }
    return run([*before, sys.executable, *args], environ=variables, cwd=cwd)


def run_launcher(
    *words: str | Path,
    cwd: str | Path | None = None,
    before: Iterable[str | Path] = (),
    **variables: str,
) -> Result:
    """Run torchrun_hpc to its end, outside of any job.

    Args:
        words: Options, a script, and its arguments.
        cwd: Working directory.
        before: A command that starts it.
        variables: Variables to add.
    """
    command = ("-m", "torchrun_hpc", *words)
    environ = clean_environ() | variables
    return run_python(*command, cwd=cwd, environ=environ, before=before)
