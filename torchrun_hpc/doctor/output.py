"""The outputs of a report: text for the user, and files."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torchrun_hpc import files, wire
from torchrun_hpc.doctor import page, text
from torchrun_hpc.errors import LaunchError, Message
from torchrun_hpc.reporting import console, streams

if TYPE_CHECKING:
    from collections.abc import Callable

    from torchrun_hpc.doctor.results import Report

    Tell = Callable[[Message], None]

STDOUT = "-"  # instead of a file


class Output(NamedTuple):
    """The wanted outputs: names of files, or empty. `json` can be `STDOUT`."""

    json: str = ""
    html: str = ""
    is_quiet: bool = False

    def start_check(self, tell: Tell) -> None:
        """Start `check` in a daemon thread, because a file system can hang."""
        threading.Thread(target=self.check, args=[tell], daemon=True).start()

    def check(self, tell: Tell) -> None:
        """Report files that cannot be written, before the examination takes minutes."""
        for file in (self.json, self.html):
            if file not in ("", STDOUT):
                try:
                    files.check(Path(file))
                except OSError as error:
                    tell(_unwritable(file, error, ". The report is printed anyway"))

    def write(self, report: Report) -> bool:
        """Write all outputs if possible; return whether all succeeded."""
        is_data, done = self.json == STDOUT, True
        person = text.render(report, is_quiet=self.is_quiet or is_data)
        if is_data:  # for a pipe
            streams.write(person, sys.stderr)
        try:
            console.output(_as_json(report) if is_data else person)
        except LaunchError as fault:
            # The other nodes have ended, so they are not told.
            console.write(Message(fault.code, str(fault)), "error")
            done = False
        for file, content in ((self.json, _as_json), (self.html, page.write)):
            if file not in ("", STDOUT):
                try:
                    files.write(Path(file), content(report))
                except OSError as error:
                    console.write(_unwritable(file, error), "error")
                    done = False
        return done


def _as_json(report: Report) -> str:
    return json.dumps(wire.encode(report), indent=1) + "\n"


def _unwritable(file: str, error: OSError, more: str = "") -> Message:
    return Message("HPC197", f"cannot write {file}: {error.strerror}{more}")
