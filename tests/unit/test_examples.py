"""The job scripts of docs/run.md, and the examples, as text."""

import ast
import re

import pytest

from tests.support import ROOT
from tests.support.pages.blocks import PAGES, blocks
from tests.support.pages.job_scripts import job_scripts, pbs_resources

EXAMPLES = ROOT / "examples"
SCRIPTS = job_scripts()


def test_a_job_script_is_short_and_derives_nothing_by_hand():
    """It has nothing of what recipes without the launcher do before the command."""
    for script in SCRIPTS:
        assert len(script.text.splitlines()) <= 12, script
        by_hand = "scontrol|hostname|RDZV|rdzv|_IFNAME|RANK="
        assert not re.search(by_hand, script.text), script


def test_a_job_script_starts_an_example_with_options_that_it_has():
    for script in SCRIPTS:
        text = (EXAMPLES / script.example).read_text()
        arguments = script.text.partition(script.example)[2]
        for option in re.findall(r"--[a-z-]+", arguments):
            assert f'"{option}"' in text, option


def test_the_resources_of_pbs_are_those_of_the_launch_line():
    (script,) = (script for script in SCRIPTS if "#PBS" in script.text)
    nodes, resources = pbs_resources(script.text)
    assert nodes > 1
    assert resources["ngpus"] == resources["mpiprocs"] == 4
    # One task on each node, with all its CPUs.
    assert 'mpiexec -n "$nodes" --ppn 1 --cpu-bind none' in script.text


def test_an_example_knows_no_cluster_and_is_on_the_page():
    page = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        tree = ast.parse(path.read_text())
        text = "\n".join(map(ast.unparse, tree.body[1:]))  # without the docstring
        assert not re.findall("SLURM|PBS|OMPI|PMI_|torchrun_hpc|hostlist", text), path
        assert f"[{path.name}]({path.name})" in page


# What initialises a process group, and what ends it. Frameworks do the first for a
# script, Lightning the second on GPUs only.
BEGINS = {"init_process_group", "init_distributed", "Accelerator", "Trainer"}
ENDS = {"destroy_process_group", "end_training"}


def leaves_its_group(program):
    """Return whether a program initialises a process group and does not end it."""
    functions = [
        node.func for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call)
    ]
    called = {ast.unparse(function).rpartition(".")[2] for function in functions}
    return bool(called & BEGINS) and not called & ENDS


@pytest.mark.parametrize(
    ("program", "leaves"),
    [
        ("print(1)", False),
        ("dist.init_process_group('gloo')", True),
        ("from torch.distributed import *\ninit_process_group()", True),
        ("init_process_group()\n# destroy_process_group()", True),
        ("init_process_group()\ndestroy_process_group", True),
        ("init_process_group()\ntorch.distributed.destroy_process_group()", False),
        ("try: init_process_group()\nfinally: destroy_process_group()", False),
        ("a = Accelerator(cpu=True)", True),
        ("a = Accelerator(cpu=True)\na.end_training()", False),
        ("t = lightning.Trainer()\nt.fit(m)", True),
        ("t = lightning.Trainer()\nt.fit(m)\ndist.destroy_process_group()", False),
        ("deepspeed.init_distributed()", True),
    ],
)
def test_programs_that_leave_their_process_group(program, leaves):
    assert leaves_its_group(program) is leaves


def shown_programs():
    """Return the programs that examples and documentation show, by their places."""
    files = {path.relative_to(ROOT): path for path in EXAMPLES.rglob("*.py")}
    found = {str(name): path.read_text() for name, path in files.items()}
    for page in PAGES:
        for number, block in enumerate(blocks(page)):
            if block.language == "python":
                found[f"{page} {number}: {block.heading}"] = block.text
    return found


@pytest.mark.parametrize("place", shown_programs())
def test_an_example_ends_its_process_group(place):
    """Otherwise gloo may abort the worker at its end: see docs/troubleshooting.md."""
    assert not leaves_its_group(shown_programs()[place])
