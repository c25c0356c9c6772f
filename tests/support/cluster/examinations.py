"""Examinations by the doctor, on links of the test cluster that have a rate."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.cluster.commands import JUELICH
from tests.support.pages.blocks import block, replaced

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from tests.support.cluster.testbed import Cluster

# Mbit/s of each link, which a busy machine has time for. Without a limit, the rate on
# two cores is noise.
MBITS = 100
DOCTOR = ("python", "-m", "torchrun_hpc.doctor")
SMALL = "--max-bytes=8"  # of the collectives: the links are what it is about
# Torch is imported once on each node.
PRELOADED = JUELICH | {"PET_HPC_PRELOAD": "torch"}
# One on each node, which does not have to wait for what else the machine has to do.
STEP = ("-N3", "--ntasks-per-node=1", "nice", "-n-40")


class Examined(NamedTuple):
    """What came of an examination."""

    report: dict[str, Any]
    done: subprocess.CompletedProcess[str]

    @property
    def suspects(self) -> list[tuple[str, list[int]]]:
        """Codes and nodes of what is suspect."""
        found = self.report["findings"]
        return [(f["code"], f["nodes"]) for f in found if f["is_suspect"]]

    @property
    def verdict(self) -> list[str]:
        """The lines of the verdict: which nodes, and the line to copy."""
        return self.done.stdout.partition("\n\n")[0].splitlines()

    def text(self, code: str) -> str:
        """Return the text of the findings with a code."""
        found = self.report["findings"]
        return "; ".join(f["text"] for f in found if f["code"] == code)


def examined(
    done: subprocess.CompletedProcess[str], file: Path, code: int | None = 0
) -> Examined:
    """Read what an examination has written.

    Args:
        done: Its end.
        file: Its report.
        code: The exit code. None: any, because links without a rate are noise.
    """
    print(done.stdout, done.stderr)
    assert code in (None, done.returncode), done.stderr
    assert "Traceback" not in done.stderr
    return Examined(json.loads(file.read_text()), done)


def examine_as_on_page(  # noqa: PLR0913, PLR0917 - the last two have defaults
    cluster: Cluster,
    folder: Path,
    words: str,
    instead: dict[str, str],
    lines: int | None = None,
    env: dict[str, str] = PRELOADED,
) -> subprocess.CompletedProcess[str]:
    """Run an example of the page, or its first lines, on three nodes."""
    small = {"srun": shlex.join(["srun", *STEP])} | instead
    text = "\n".join(block("docs/troubleshooting.md", words).text.splitlines()[:lines])
    text = replaced(text, small)
    return cluster.run(["bash", "-ec", text], env=env, cwd=folder)
