"""A training of three workers on nodes of its own, to which faults are done."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.support.cluster.commands import FORMS, JUELICH, SCRIPTS
from tests.support.cluster.real_job import RealJob
from tests.support.patience import NEVER_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.support.cluster.testbed import Cluster

SCRIPT = str(SCRIPTS / "training.py")

# With these options no silence ends a job, and no worker is killed that does not end.
# Closed connections and SIGTERM show what follows a fault.
NEVER = (
    f"--rdzv_conf=keep_alive_interval={NEVER_S},keep_alive_max_attempt=1",
    f"--shutdown-timeout={NEVER_S}",
)

# Each starting job loads torch six times. Two start at once, and all may run.
STARTING = threading.Semaphore(2)

# A job with these outlives its nodes.
OUTLIVES = ("--no-kill", "--kill-on-bad-exit=0")


class TrainingJob(RealJob):
    """A job of some nodes with three workers; see scripts/training.py.

    Args:
        cluster: The cluster.
        hosts: Nodes of it that nobody else uses. Those after the third are spares.
        folder: Where the workers write.
        form: How the workers are started; see `FORMS`.

    Attributes:
        folder: Where the workers write.
        expected: The nodes on which the workers should be, by rank.
    """

    def __init__(
        self, cluster: Cluster, hosts: Sequence[str], folder: Path, form: str
    ) -> None:
        super().__init__(cluster, hosts=hosts, environ=JUELICH | FORMS[form])
        self.folder = folder
        self.expected = [*hosts[:3]]

    def start(
        self,
        *options: str,
        words: str = "",
        first: str = "",
        attempt: int | None = 0,
    ) -> None:
        """Start it, and wait until all workers train and all spares wait.

        Args:
            *options: The launcher's options.
            words: The script's arguments.
            first: What the shell on each node does before.
            attempt: After how many restarts the workers train. None: do not wait.
        """
        spares = len(self.hosts) - 3
        if spares:
            late = f"--hpc-spare-after={NEVER_S}"
            options = (f"--hpc-spares={spares}", late, *options)
        self.set_command(
            *options,
            script=(SCRIPT, self.folder, *words.split()),
            hosts=self.hosts,
            srun=("--label", *(OUTLIVES if spares else ())),
            first=f'{first}\n"$@"; echo $? > {self.folder}/exit.$SLURM_NODEID; exit',
        )
        with STARTING:
            super().start()
            if attempt is not None:
                self.wait(partial(self.trains, attempt))
                self.wait(lambda: all(map(self.is_accepted, range(3, len(self.hosts)))))

    def codes(self) -> list[int | None]:
        """Return the agents' exit codes, as a shell sees them, by node."""
        files = [self.folder / f"exit.{node}" for node in range(len(self.hosts))]
        return [int(file.read_text()) if file.exists() else None for file in files]

    def beats(self) -> list[dict[str, Any]]:
        """Return what the workers wrote last, by rank."""
        files = [self.folder / f"beat.{rank}" for rank in range(3)]
        return [json.loads(file.read_text()) for file in files if file.exists()]

    def places(self) -> list[str]:
        """Return the nodes of the workers, by rank."""
        return [beat["host"] for beat in self.beats()]

    def steps(self) -> list[int]:
        """Return how many steps each worker has made, the fewest first."""
        return sorted(beat["steps"] for beat in self.beats())

    def trains(self, attempt: int = 0) -> bool:
        """Return whether all workers train, after so many restarts."""
        return [beat["attempt"] for beat in self.beats()] == [attempt] * 3

    def stop(self) -> None:
        """Let the workers stop when their step is done."""
        (self.folder / "stop").touch()

    def ends_well(self, *lost: int) -> None:
        """Let the training stop. All agents but those of lost nodes end with code 0."""
        self.stop()
        self.end()
        codes = self.codes()
        left = [code for node, code in enumerate(codes) if node not in lost]
        assert left == [0] * len(left), self.output
        assert "Traceback" not in self.output, self.output
