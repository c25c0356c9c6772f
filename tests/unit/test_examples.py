"""The job scripts of examples/README.md, and the examples, as text."""

import ast
import re

import pytest
from job_scripts import PAGE, job_scripts, pbs_resources
from pages import ROOT

EXAMPLES = ROOT / "examples"
SCRIPTS = job_scripts()
each_script = pytest.mark.parametrize("script", SCRIPTS, ids=str)
each_example = pytest.mark.parametrize(
    "path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name
)


def test_each_kind_of_machine_has_its_scripts():
    assert [str(script) for script in SCRIPTS] == [
        "Jülich: JUWELS Booster-resnet50_ddp.py",
        "Jülich: JUWELS Booster-fsdp.py",
        "NCAR: Derecho-fsdp.py",
        "Dresden: Capella-resnet50_ddp.py",
        "Dresden: Capella-lightning_ddp.py",
        "ThaiSC: TARA-resnet50_ddp.py",
        "Two machines without a scheduler-accelerate_ddp.py",
        "Two machines without a scheduler-resnet50_ddp.py",
    ]


@each_script
def test_a_job_script_is_short(script):
    assert len(script.text.splitlines()) <= 12


@each_script
def test_a_job_script_derives_nothing_by_hand(script):
    """What recipes without the launcher do in front of the command."""
    assert not re.search("scontrol|hostname|RDZV|rdzv|_IFNAME|RANK=", script.text)


@each_script
def test_a_job_script_starts_an_example_with_options_that_it_has(script):
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


@each_example
def test_nothing_of_the_cluster_is_in_an_example(path):
    tree = ast.parse(path.read_text())
    tree.body = tree.body[1:]  # without the docstring
    found = re.findall("SLURM|PBS|OMPI|PMI_|torchrun_hpc|hostlist", ast.unparse(tree))
    assert not found


@each_example
def test_the_page_lists_each_example(path):
    assert f"[{path.name}]({path.name})" in (ROOT / PAGE).read_text()
