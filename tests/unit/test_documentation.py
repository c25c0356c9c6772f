"""Each command of the documentation is run by a test, or says that it is not."""

import ast
import doctest
import re
import subprocess
import sys
from pathlib import Path

import documented
import pytest
from documented import BLOCKS, NOT_RUN, command_blocks, commands, found
from pages import PAGES, ROOT, block, blocks, outside_of_blocks, replaced

each_page = pytest.mark.parametrize("page", PAGES)


def by_tests():
    """Return what other tests run than that of the cluster."""
    return [
        (page, words, entry)
        for page, entries in BLOCKS.items()
        for words, entry in entries.items()
        if isinstance(entry, str)
    ]


@each_page
def test_each_command_is_run_or_says_that_it_is_not(page):
    """Never both."""
    for each in command_blocks(page):
        entries = [words for words in BLOCKS.get(page, {}) if each.has(words)]
        assert len(entries) == (not each.title.startswith(NOT_RUN)), (each, entries)


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


@pytest.mark.parametrize(("page", "words", "test"), by_tests())
def test_a_test_that_runs_a_block_exists(page, words, test):
    file, _, name = test.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    typed = [line.partition("#")[0].strip() for line in commands(*found(page, words))]
    assert f"\ndef {name}(" in text if name else set(typed) <= {*text.splitlines()}


@each_page
def test_each_block_has_a_language(page):
    assert all(each.language for each in blocks(page))
    assert "```" not in outside_of_blocks(page)


@each_page
def test_no_block_is_indented(page):
    assert not re.findall("\n\n {4}.*", outside_of_blocks(page))


@each_page
def test_commands_can_be_parsed(page):
    for each in blocks(page):
        if each.language == "bash":
            assert "..." not in each.text
            subprocess.run(["bash", "-n"], input=each.text, text=True, check=True)
        elif each.language == "python":
            ast.parse(each.text)


@pytest.mark.parametrize(
    ("page", "words"), [(p, w) for p, w, test in by_tests() if test == documented.SITES]
)
def test_the_command_sites(page, words, tmp_path):
    """It prints what the page shows, on a login node of JUWELS Booster."""
    (shown,) = found(page, words)
    mine = block("docs/sites.md", "[argon]").text
    is_wrong = "HPC043" in shown.text
    misspelt = {"replacement": "replacment"} if is_wrong else {}
    (tmp_path / "mine.toml").write_text(replaced(mine, misspelt), encoding="utf-8")
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path),
        "LANG": "C.UTF-8",
    }
    for command, output in shown.prompts() or [(shown.text, "jsc ...")]:
        is_here = {"SYSTEMNAME": "juwelsbooster"} if " here" in command else {}
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environ | is_here,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=60,
            check=False,
        )
        assert done.returncode == (2 if is_wrong else 0)
        same = doctest.OutputChecker().check_output(
            output, done.stdout, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        )
        assert same, done.stdout
