"""A shell can read the commands of the pages. Without a cluster, some are run."""

from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

from tests.support import ROOT
from tests.support.pages import documented
from tests.support.pages.blocks import PAGES, block, blocks
from tests.support.pages.documented import BLOCKS, found
from tests.support.patience import PATIENCE

CHECK = 'for text in "$@"; do bash -n <<< "$text" || exit 1; done'


def test_commands_can_be_parsed():
    for page in PAGES:
        texts = [each.text for each in blocks(page) if each.language == "bash"]
        assert not [text for text in texts if "..." in text], page
        subprocess.run(["bash", "-c", CHECK, "bash", *texts], check=True)


def test_the_command_sites(tmp_path):
    """It prints what the pages show, on a login node of JUWELS Booster."""
    for page, entries in BLOCKS.items():
        for words, entry in entries.items():
            if entry == documented.SITES:
                (shown,) = found(page, words)
                check_sites(shown, tmp_path)


def check_sites(shown, folder):
    mine = block("docs/reference.md", "[argon]").text
    (folder / "mine.toml").write_text(mine, encoding="utf-8")
    environ = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(ROOT),
        "HOME": str(folder),
        "LANG": "C.UTF-8",
    }
    for command, output in shown.prompts():
        is_here = {"SYSTEMNAME": "juwelsbooster"} if " here" in command else {}
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environ | is_here,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=PATIENCE,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        same = doctest.OutputChecker().check_output(
            output, done.stdout, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        )
        assert same, done.stdout
