"""Each command of the documentation is run by a test, or says that it is not."""

import ast
import re

from tests.support import ROOT
from tests.support.pages import documented
from tests.support.pages.blocks import PAGES, blocks, outside_of_blocks
from tests.support.pages.documented import (
    BLOCKS,
    NOT_RUN,
    command_blocks,
    commands,
    found,
)


def test_each_command_is_run_or_says_that_it_is_not():
    """Never both."""
    for page in PAGES:
        for each in command_blocks(page):
            entries = [words for words in BLOCKS.get(page, {}) if each.has(words)]
            is_run = not each.title.startswith(NOT_RUN)
            assert len(entries) == is_run, (page, each, entries)


# The lines of a centre's job script, by its scheduler.
SLURM = ("--account=PROJECT", "--time=", "--nodes=", "--cpus-per-task=")
JOB_LINES = {
    "#SBATCH": (*SLURM, 'export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"', "srun "),
    "#PBS": ("-A PROJECT", " -q ", "-l walltime=", "-l select=", "mpiexec "),
    "#BSUB": ("-P PROJECT", " -q ", " -W ", "-nnodes ", "jsrun "),
    "#flux": ("--bank=PROJECT", "--queue=", "--time-limit=", "-N", "flux run "),
}


def test_each_job_script_has_what_centres_need():
    scripts = [(page, each.text) for page in PAGES for each in command_blocks(page)]
    path = "examples/requeue/job.sh"
    scripts.append((path, (ROOT / path).read_text(encoding="utf-8")))
    found = [(page, text) for page, text in scripts if "#!/bin/bash" in text]
    assert len(found) > 10
    for page, text in found:
        (kind,) = (kind for kind in JOB_LINES if kind in text)
        missing = [words for words in JOB_LINES[kind] if words not in text]
        assert not missing, (page, text)
        assert "source .venv/bin/activate" in text or "--image=IMAGE" in text, text
        if kind == "#SBATCH":
            assert re.search("--gres=gpu:|--gpus-per-node=", text), (page, text)
            # Capella's Slurm is for one partition.
            assert re.search("--partition=|--qos=|--mincpus=", text), (page, text)


def test_each_entry_is_about_one_block():
    wrong = [
        (page, words)
        for page, entries in BLOCKS.items()
        for words in entries
        if page not in PAGES or len(found(page, words)) != 1
    ]
    assert not wrong


def test_each_command_of_a_block_whose_commands_are_run_by_themselves_is_run():
    for page, entries in BLOCKS.items():
        for words, entry in entries.items():
            if isinstance(entry, list) and entry[0].line:
                for command in commands(found(page, words)[0]):
                    assert sum(command.startswith(run.line) for run in entry) == 1, (
                        command
                    )


def test_what_is_replaced_is_there():
    assert all(run.text(shown) for _, run, shown in documented.runs())


def test_a_test_that_runs_a_block_exists():
    for page, entries in BLOCKS.items():
        for words, test in entries.items():
            if isinstance(test, str):
                file, _, name = test.partition("::")
                text = (ROOT / file).read_text(encoding="utf-8")
                if name:
                    assert f"\ndef {name}(" in text, test
                else:
                    lines = commands(*found(page, words))
                    typed = {line.partition("#")[0].strip() for line in lines}
                    run = {line.partition(" | ")[0] for line in text.splitlines()}
                    assert typed <= run, (page, words)


def test_each_block_has_a_fence_and_a_language():
    for page in PAGES:
        assert all(each.language for each in blocks(page)), page
        text = outside_of_blocks(page)
        assert "```" not in text, page
        assert not re.findall("\n\n {4}.*", text), page  # indented


def test_python_can_be_parsed():
    for page in PAGES:
        for each in blocks(page):
            if each.language == "python":
                ast.parse(each.text)
