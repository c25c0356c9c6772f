"""The job scripts of examples/README.md, and the examples, as text."""

import ast
import re

from job_scripts import PAGE, job_scripts, pbs_resources
from pages import ROOT

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
    page = (ROOT / PAGE).read_text()
    for path in EXAMPLES.glob("*.py"):
        tree = ast.parse(path.read_text())
        text = ast.unparse(tree.body[1:])  # without the docstring
        assert not re.findall("SLURM|PBS|OMPI|PMI_|torchrun_hpc|hostlist", text), path
        assert f"[{path.name}]({path.name})" in page
