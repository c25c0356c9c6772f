"""A launch whose workers wait until they are told to stop or to fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.cluster.commands import SCRIPTS
from tests.support.cluster.real_job import RealJob

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Unpack

    from tests.support.cluster.real_job import How
    from tests.support.cluster.testbed import Cluster

STEADY = str(SCRIPTS / "steady.py")


class SteadyJob(RealJob):
    """A launch with one worker on each node; see scripts/steady.py.

    Args:
        cluster: The cluster.
        folder: The script's folder.
        *options: The launcher's options.
        **how: As for `RealJob`; a `script` runs scripts/steady.py itself.
    """

    def __init__(
        self, cluster: Cluster, folder: Path, *options: str, **how: Unpack[How]
    ) -> None:
        how["script"] = (*how.get("script", (STEADY,)), folder)
        super().__init__(cluster, *options, **how)
        self.folder = folder

    def works(self, attempt: int = 0) -> None:
        """Wait until all workers are there, after so many restarts."""
        ranks = range(len(self.hosts))
        files = [self.folder / f"up{rank}.{attempt}" for rank in ranks]
        self.wait(lambda: all(file.exists() for file in files))

    def fail(self, rank: int, attempt: int) -> None:
        """Let a worker end with exit code 3."""
        (self.folder / f"fail{rank}.{attempt}").touch()

    def stop(self, rank: int | str = "") -> None:
        """Let a worker, or all, end with exit code 0."""
        (self.folder / f"stop{rank}").touch()
