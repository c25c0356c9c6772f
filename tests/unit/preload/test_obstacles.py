"""What speaks against preloading by default: tools, and variables of the script."""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import explicit
from torchrun_hpc.options.options import read
from torchrun_hpc.preload import plan


def of_default(environ=(), words=(), **options):
    return plan.obstacle(read(explicit(options), tuple(words)), dict(environ))


@pytest.mark.parametrize(
    ("environ", "obstacle"),
    [
        ({}, ""),
        ({"KINETO_USE_DAEMON": ""}, ""),
        ({"KINETO_USE_DAEMON": "1"}, "KINETO_USE_DAEMON is set"),
        ({"LD_PRELOAD": "/opt/lib/libdarshan.so libxalt_init.so:"}, ""),
        ({"LD_PRELOAD": "a.so:/opt/lib/libhpcrun.so"}, "LD_PRELOAD has libhpcrun.so"),
        ({"LD_PRELOAD": "libmpitrace.so"}, "LD_PRELOAD has libmpitrace.so"),
    ],
)
def test_tools(environ, obstacle):
    assert of_default(environ) == obstacle
    assert not of_default(environ, hpc_preload="torch")
    assert not of_default(environ, hpc_preload="none")


@pytest.mark.parametrize(
    ("platform", "version", "is_tried"),
    [
        ("linux", (3, 10, 13), True),
        ("linux", (3, 13, 0), True),
        ("linux", (3, 99, 0), False),
        ("darwin", (3, 11, 0), False),
    ],
)
def test_where_forks_were_compared(monkeypatch, platform, version, is_tried):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sys, "version_info", version)
    assert (not of_default()) == is_tried


# Texts of files, the first one is the script, and what may be set before the import.
FILES = {
    "none": ({"a.py": "import torch"}, ""),
    "item": (
        {"a.py": "import os\nos.environ['OMP_SCHEDULE'] = 'static'\nimport torch"},
        "a.py names OMP_SCHEDULE",
    ),
    "argument": (
        {"a.py": "environ.update(TORCH_LOGS='+all')"},
        "a.py names TORCH_LOGS",
    ),
    "in a function": (
        {"a.py": 'def main():\n    putenv("TORCH_LOGS", "")\n    import torch'},
        "a.py names TORCH_LOGS",
    ),
    "after the import": ({"a.py": "import torch.nn\nset('TORCH_LOGS')"}, ""),
    "after another import": (
        {"a.py": "import numpy, os\nset('TORCH_LOGS')\nfrom torch import nn"},
        "a.py names TORCH_LOGS",
    ),
    "a word of a text": ({"a.py": "# TORCH_LOGS\nx = 'TORCH_LOGS is not set'"}, ""),
    "not read at the import": ({"a.py": "set('NCCL_DEBUG')"}, ""),
    "file of variables": (
        {"a.py": "from dotenv import load_dotenv"},
        "a.py reads variables with dotenv",
    ),
    "module": ({"a.py": "import b as c", "b.py": "e['OMP_SCHEDULE']"}, "OMP_SCHEDULE"),
    "second module": (
        {"a.py": "import os, b.c  # x", "b/c.py": "e['OMP_SCHEDULE']"},
        "c.py names OMP_SCHEDULE",
    ),
    "package": (
        {
            "a.py": "from b import (c, d)",
            "b/c.py": "from .e.f import g",
            "b/e/f.py": "from .. import h",
            "b/h.py": "e['OMP_SCHEDULE']",
        },
        "h.py names OMP_SCHEDULE",
    ),
    "names on lines of their own": (
        {"a.py": "from b import (\n    c,\n    d,\n)", "b/d.py": "e['OMP_SCHEDULE']"},
        "d.py names OMP_SCHEDULE",
    ),
    "circle": ({"a.py": "import b", "b.py": "import a, b"}, ""),
    "no text": ({"a.py": "\0\xff", "b.py": ""}, ""),
    "large": ({"a.py": "#" * 2**18 + "\n'TORCH_LOGS'"}, ""),
}


@pytest.mark.parametrize("case", FILES)
def test_variables_of_a_script(tmp_path, monkeypatch, case):
    texts, obstacle = FILES[case]
    for name, text in texts.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(textwrap.dedent(text), "latin-1")
    found = of_default(words=[str(tmp_path / "a.py")])
    assert found.endswith(obstacle)
    assert bool(found) == bool(obstacle)
    monkeypatch.chdir(tmp_path)
    assert of_default(words=["a"], module=True) == found
    (tmp_path / "a.py").rename(tmp_path / "__main__.py")
    assert of_default(words=["."]) == found.replace("a.py", "__main__.py")


def test_the_packages_of_a_module(tmp_path, monkeypatch):
    """They run before it."""
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "__init__.py").write_text("e['OMP_SCHEDULE']")
    monkeypatch.chdir(tmp_path)
    found = of_default(words=["b.c.d"], module=True)
    assert found == "__init__.py names OMP_SCHEDULE"


@given(st.text("import from.,()ab_'\n\t \0/#"))
def test_any_text(words):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.py")
        path.write_text(f"import {words}", "utf-8")
        assert not of_default(words=[str(path)])


@pytest.mark.parametrize("kind", ["missing", "fifo"])
def test_a_script_that_cannot_be_read_twice(tmp_path, kind):
    if kind == "fifo":
        os.mkfifo(tmp_path / "a.py")
    assert not of_default(words=[str(tmp_path / "a.py")])
