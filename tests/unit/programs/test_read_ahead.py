"""Which files an import reads, found without importing anything."""

from __future__ import annotations

import ast
import compileall
import importlib.util
import io
import struct
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.patience import until
from torchrun_hpc.programs import read_ahead

MANY = "".join(f"name{number} = {number}.5\n" for number in range(300))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("", []),
        ("import x", ["x"]),
        ("import x.y, z as w", ["x.y", "z"]),
        ("from x.y import z as w, v", ["x.y", "x.y.z", "x.y.v"]),
        ("from x import *", ["x", "x.*"]),
        ("from . import x", ["a.b", "a.b.x"]),
        ("from .x import y", ["a.b.x", "a.b.x.y"]),
        ("from .. import x", ["a", "a.x"]),
        ("from ..x.y import z", ["a.x.y", "a.x.y.z"]),
        ("try:\n import x\nexcept ImportError:\n import y", ["x", "y"]),
        ("if x:\n import y\nelse:\n import z", ["y", "z"]),
        ("def f():\n import x", []),  # not when the module runs
        ("if TYPE_CHECKING:\n import x\nimport y", ["y"]),
        ("if TYPE_CHECKING:\n import x\nelse:\n import y", ["y"]),
        ("if typing.TYPE_CHECKING:\n import x\nimport y", ["y"]),
        ("TYPE_CHECKING\nif x:\n import y", ["y"]),
        (f"{MANY}import x\nfrom ..y import z", ["x", "a.y", "a.y.z"]),
        (
            f"if TYPE_CHECKING:\n import x\n {MANY.replace(chr(10), ';')}\nimport y",
            ["y"],
        ),
    ],
)
def test_imports(source, expected):
    code = compile(source, "module", "exec", dont_inherit=True)
    assert [*read_ahead.imports(code, "a.b")] == expected


NAMES = st.sampled_from(["x", "y.z", "TYPE_CHECKING", "u"])
IMPORTS = st.one_of(
    st.builds("import {}".format, NAMES),
    st.builds("from {} import n, m".format, NAMES),
    st.builds("from .{} import n".format, NAMES),
    st.builds("value = {}".format, st.integers() | st.floats(0, 1)),
)


@given(st.lists(IMPORTS, max_size=40))
def test_imports_are_those_of_the_source(lines):
    source = "\n".join(lines)
    expected = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            expected += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = f"{'a.' * node.level}{node.module}"
            expected += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    code = compile(source, "module", "exec", dont_inherit=True)
    assert [*read_ahead.imports(code, "a")] == expected


MODULES = {
    "package/__init__.py": "from .first import *\nfrom typing import TYPE_CHECKING",
    "package/first.py": "import package.second, missing, package.missing.third",
    "package/second.py": "from .deep import third, name\nfrom . import wrong",
    "package/wrong.py": "import unread",
    "package/deep/__init__.py": "if TYPE_CHECKING:\n import unread",
    "package/deep/third.py": "import package\ndef function():\n import unread",
    "package/deep/name.py": "",
    "unread.py": "",
}


@pytest.fixture(scope="module")
def opened():
    """Return the files that were opened: it grows."""
    files: set[str] = set()

    def note(event, arguments):
        if event == "open":
            files.add(str(arguments[0]))

    sys.addaudithook(note)  # forever
    return files


def test_what_an_import_reads_is_read(opened, monkeypatch, tmp_path):
    for name, source in MODULES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(source)
    compileall.compile_dir(tmp_path, quiet=1)
    wrong = Path(importlib.util.cache_from_source(tmp_path / "package/wrong.py"))
    wrong.write_bytes(b"of another Python")
    monkeypatch.setattr(read_ahead, "FOLDERS", [str(tmp_path)])
    read_ahead.read.cache_clear()
    opened.clear()
    read_ahead.read("package")
    expected = {
        importlib.util.cache_from_source(tmp_path / name)
        for name in MODULES.keys() - {"unread.py"}
    }
    until(lambda: expected <= opened)
    assert importlib.util.cache_from_source(tmp_path / "unread.py") not in opened
    assert "package" not in sys.modules


def test_entry_points_are_read(opened, monkeypatch, tmp_path):
    packages = ("one-1.0.dist-info", "two.egg-info", "three")
    for name in packages:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(read_ahead, "FOLDERS", ["missing", str(tmp_path)])
    read_ahead.read_entry_points()
    found = {path for path in opened if path.startswith(str(tmp_path))}
    assert found == {f"{tmp_path}/{name}/entry_points.txt" for name in packages[:2]}


LIBRARY = [  # kind, flags, offset, size
    (0, 0, 0, 0),
    (1, 2, 64, 10),  # constants
    (1, 6, 80, 2**25),  # code
    (1, 6, 90, 2**28),  # code, more than loading reads
    (1, 2, 99, 2**27),  # code for GPUs
    (11, 2, 200, 30),  # names
    (0x70000001, 2, 250, 40),  # for exceptions
    (8, 3, 300, 40),  # variables that are 0: not in the file
    (3, 0, 400, 50),  # for debuggers
]


def test_the_parts_of_a_library():
    sections = b"".join(struct.pack("<4xIQ8xQQ24x", *section) for section in LIBRARY)
    header = struct.pack("<40xQ12xH2x", 64, len(LIBRARY))
    found = read_ahead.parts(io.BytesIO(header + sections))
    assert [*found] == [(64, 10), (80, 2**25), (90, 2**26), (200, 30)]
