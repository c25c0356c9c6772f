"""How tests run the commands of the documentation, or why they do not.

Each block of commands has an entry in `BLOCKS`, whose key is words that are in the
block or its heading, and in no other block of commands of the page; or it has a title
that begins with `NOT_RUN`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tests.support.cluster.commands import PBS
from tests.support.pages.blocks import blocks, replaced

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.pages.blocks import Block

NOT_RUN = "Not run by the tests: "


@dataclass(frozen=True)
class Run:
    """How test_documentation.py runs a block, or a command of it.

    Attributes:
        where: A shell in a job runs it, or it is a job's script, or shells on machines
            without a scheduler run it. These may call a certain mpirun or mpiexec.
        starts: The beginning of the launcher's first line, after its code.
        workers: Their number.
        instead: Words of the page, and their replacements.
        options: The job's, which count more than those in its script.
        hosts: The machines whose shells run it.
        environ: Variables. HOSTFILE is a file with two lines for each of two machines.
        prints: A pattern of other output.
        line: The beginning of the only command that is run.
    """

    where: Literal["job", "script", "machines", "Open MPI 4", "MPICH 4", "Intel MPI"]
    starts: str
    workers: int
    instead: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ("--nodes=2", "--ntasks-per-node=1")
    hosts: tuple[str, ...] = ("n9",)
    environ: Mapping[str, str] = field(default_factory=dict)
    prints: str = ""
    line: str = ""

    def text(self, block: Block) -> str:
        """Return the commands of a block that this runs."""
        text = block.text
        if self.line:
            (text,) = (each for each in commands(block) if each.startswith(self.line))
        return replaced(text, self.instead)


def commands(block: Block) -> list[str]:
    """Return the commands of a block, each with its continuation lines."""
    lines = re.split(r"(?<!\\)\n", block.text)
    return [line for line in lines if line and not line.startswith("#")]


def command_blocks(page: str) -> list[Block]:
    """Return the blocks of a page with commands for a shell."""
    return [each for each in blocks(page) if each.language in {"bash", "console"}]


def found(page: str, words: str) -> list[Block]:
    """Return the blocks of commands of a page that have these words."""
    return [each for each in command_blocks(page) if each.has(words)]


# Nodes of the test cluster have no GPUs, and CPUs for one worker more or less.
TWO = {"--nproc_per_node=gpu": "--nproc_per_node=2"}
AGENTS = "2 nodes, 2 workers here; "
TASKS = ("--nodes=2", "--ntasks-per-node=4")
MACHINES = {"node1": "n9"}
SMALL = ("--nodes=2", "--gres=gpu:2", "--cpus-per-task=1")
THREE = ("--nodes=3", "--ntasks-per-node=1")
SPARE = TWO | {"--hpc-spares=2": "--hpc-spares=1"}
NO_PARTITION = {" --partition=PARTITION": ""}
HERE = {"examples/ddp.py --steps 100": "main.py"} | NO_PARTITION
# A line whose subject is an option: one node is enough.
ONE = ("--nodes=1", "--ntasks-per-node=1")
ON_ONE = "1 node, 2 workers"
WITH_ONE = "2 nodes and 1 spare, 2 workers here; "

ON_EACH = Run(
    "machines", f"{AGENTS}no scheduler", 4, TWO | MACHINES, hosts=("n9", "n10")
)

CI = ".ci/run"
PACKAGE = "tests/more/packaging/test_package.py::environment"
PICTURE = (
    "tests/more/documentation/test_documentation.py::test_by_hand_and_with_the_launcher"
)
EXAMPLES = "tests/more/documentation/test_examples.py::test_"
LOGS = (
    "tests/more/dropin/test_launch.py::test_the_report_has_the_traceback_of_a_log_file"
)
SHELL = "tests/more/documentation/test_documentation.py::test_a_first_session"
RECIPES = "tests/more/packaging/test_recipes.py::test_"
SITES = "tests/more/documentation/test_pages.py::test_the_command_sites"

# By page and words: how it is run here, or by which test elsewhere.
BLOCKS: dict[str, dict[str, list[Run] | str]] = {
    "README.md": {
        "first=": PICTURE,
        "gpu train.py": PICTURE,
        "pip install .": PACKAGE,
        "make demo": CI,
        "#SBATCH": [
            Run("script", AGENTS, 4, TWO | HERE, options=SMALL)
        ],
    },
    "CONTRIBUTING.md": {"make demo": CI},
    "docs/README.md": {
        "--nproc_per_node=gpu": [
            Run("job", ON_ONE, 2, TWO | {"examples/ddp.py": "main.py"},
                options=ONE, prints="Nothing was started")
        ],
        "make cluster": SHELL,
        "torchrun_hpc --nproc_per_node=2 examples/ddp.py": SHELL,
        "--hpc-dry-run --nproc_per_node=2": SHELL,
        "dpp.py": SHELL,
    },
    "docs/install.md": {"pip install .\n": PACKAGE, "make demo": CI},
    "docs/administrators.md": {"--version": f"{RECIPES}lmod_loads_its_module"},
    "docs/frameworks.md": {
        "gpu train.py": [Run("job", AGENTS, 4, TWO)],
        "--ntasks-per-node=4": [Run("job", "2 nodes x 4 tasks", 8, options=TASKS)],
        "--redirects=3": LOGS,
        "launch": "tests/more/frameworks/test_frameworks.py::test_accelerate_launch",
    },
    "docs/run.md": {
        "#SBATCH & main.py": [Run("script", f"{AGENTS}Slurm", 4, TWO, options=SMALL)],
        "--het-group=1": [
            Run("job", "3 nodes, 1 worker here; Slurm", 3,
                options=("--nodes=1", ":", "--nodes=2"))
        ],
        "mpirun & PBS_NODEFILE": [
            Run("Open MPI 4", f"{AGENTS}Open MPI in PBS", 4, TWO, environ=PBS)
        ],
        "mpiexec & Intel": [
            Run("Intel MPI", f"{AGENTS}Hydra in PBS", 4, TWO, environ=PBS),
            Run("MPICH 4", f"{AGENTS}Hydra in PBS", 4, TWO, environ=PBS),
        ],
        "node1:8": [
            Run("Open MPI 4", f"{AGENTS}Open MPI", 4,
                TWO | MACHINES | {"node2": "n10"})
        ],
        "--rdzv_backend=c10d": [ON_EACH],
        "On one machine": [Run("machines", "2 workers on this machine", 2, TWO)],
        "direct mode & train.py": [
            Run("job", "2 nodes x 4 tasks; Slurm", 8, options=TASKS)
        ],
        "Jülich & resnet50_ddp.py":
            f"{EXAMPLES}resnet_is_killed_and_submitted_again",
        "Jülich & fsdp.py":
            f"{EXAMPLES}fsdp_is_killed_and_submitted_again_with_fewer_workers",
        "NCAR & fsdp.py": f"{EXAMPLES}fsdp_by_the_launch_line_of_pbs",
        "Dresden & resnet50_ddp.py": f"{EXAMPLES}resnet_with_agents",
        "Dresden & lightning_ddp.py": f"{EXAMPLES}lightning",
        "ThaiSC & resnet50_ddp.py": f"{EXAMPLES}resnet_each_task_a_worker",
        "accelerate_ddp.py": f"{EXAMPLES}accelerate_by_mpirun",
        "machines & resnet50_ddp.py": f"{EXAMPLES}resnet_typed_on_each_machine",
    },
    "docs/reference.md": {
        "sites list": SITES,
        "sites here": SITES,
        "sites check": SITES,
    },
    "docs/troubleshooting.md": {
        "--jobid=N": "tests/core/test_stacks.py::test_a_stall",
        "--hpc-stall-report": [Run("job", ON_ONE, 2, TWO, options=ONE)],
        "torchrun_hpc.doctor --nproc_per_node=gpu":
            "tests/more/faults/test_doctor.py::test_a_link_with_half_the_rate",
        "monday.json": "tests/core/test_doctor.py::test_a_healthy_cluster",
        "--hpc-dry-run": "tests/core/test_dry_run.py::test_table",
    },
    "docs/checkpoints.md": {
        "--signal=USR1":
            "tests/more/faults/test_signals.py::test_a_signal_ahead_of_the_end_of_the_job",
        "#PBS": "tests/more/faults/test_signals.py::"
            "test_a_signal_from_the_script_of_a_job_of_pbs",
        "--signal=B:USR1": "tests/more/faults/test_requeue.py::"
            "test_a_job_that_requeues_itself_before_its_time_limit",
        "#SBATCH --nodes=34": [
            Run("script", WITH_ONE, 4, SPARE | NO_PARTITION,
                options=(*THREE, *SMALL[1:]))
        ],
        "--hpc-health-check": [
            Run("job", WITH_ONE, 4, SPARE | {"nvidia-smi -L": "seq 4"}, options=THREE)
        ],
    },
    "docs/internals.md": {
        "--nnodes=1:2":
            "tests/more/launchers/test_steps.py::test_a_second_agent_joins_by_hand",
        "--hpc-without-patches": [
            Run("job", ON_ONE, 2, TWO, options=ONE, prints="HPC089")
        ],
    },
    "docs/speed.md": {
        "srun & --hpc-bind=gpu": [
            Run("job", ON_ONE, 2, TWO, options=ONE, prints="HPC221]: .*evenly")
        ],
    },
    "examples/README.md": {
        "sbatch": "tests/more/faults/test_requeue.py::submit",
    },
    "packaging/README.md": {
        "python -m build": f"{RECIPES}easybuild_builds_it_and_its_module_works",
        "eb $recipe": f"{RECIPES}easybuild_builds_it_and_its_module_works",
    },
    "patches/README.md": {
        "main.py": "tests/more/patches/test_patches.py::"
            "test_stock_torchrun_works_over_the_fast_network",
        "printenv": "tests/more/patches/test_patches.py"
            "::test_the_address_that_is_shown",
    },
}  # fmt: skip


def _typed(run: Run, block: Block) -> frozenset[str]:
    """Return the lines of a block for a shell, without comments and script names."""
    text = re.sub(r"\\\n\s*", "", run.text(block)).replace("train.py", "main.py")
    lines = (" ".join(line.partition(" #")[0].split()) for line in text.splitlines())
    return frozenset(line for line in lines if line and not line.startswith("#"))


def runs() -> list[tuple[str, Run, Block]]:
    """Return the blocks that are run, each with its page and words.

    Repeated lines in the same place, on this page or another, are run once: one run
    has all of them.
    """
    every = [
        (f"{page}: {words} {run.line or run.where}", run, block)
        for page, entries in BLOCKS.items()
        for words, entry in entries.items()
        if not isinstance(entry, str)
        for run in entry
        for block in found(page, words)
    ]
    places: dict[object, list[frozenset[str]]] = {}
    once = []
    for name, run, block in sorted(every, key=lambda each: -len(_typed(*each[1:]))):
        place = (run.where, run.options, run.hosts, *run.environ.items())
        typed = _typed(run, block)
        if not any(typed <= other for other in places.setdefault(place, [])):
            places[place].append(typed)
            once.append((name, run, block))
    return once
