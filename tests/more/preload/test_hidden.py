"""Imported modules are hidden, and appear at the script's import as they are."""

from __future__ import annotations

import pytest

from tests.support.processes import run_python

BEGIN = """
import importlib.util, logging, os, sys
from torchrun_hpc.preload.hidden import HiddenModules, packages
from torchrun_hpc.preload.hidden import Renewal

before, shown = packages(), []

def appeared(names):
    shown.append(names)

def hide(*apart):
    HiddenModules(packages() - before, apart, appeared)
"""
PACKAGE = """
import logging
import other, sub_of_stdlib
from . import part
count = 1 + globals().get("count", 0)
logging.getLogger("package.part").setLevel("ERROR")
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "package" / "part.py").write_text("value = []")
    (tmp_path / "other.py").write_text("value = []")
    (tmp_path / "sub_of_stdlib.py").write_text("import wave")

    def run(program):
        done = run_python("-c", BEGIN + program, cwd=tmp_path)
        assert (done.code, done.err) == (0, ""), done.err

    return run


def test_modules(run):
    run("""
import package
first = package
hide("other")
assert not {"package", "package.part", "other"} & {*sys.modules}
assert "wave" in sys.modules
spec = importlib.util.find_spec("package")
assert spec.origin.endswith("package/__init__.py") and "package" not in sys.modules
import other
assert "package" not in sys.modules and shown == [["other"]]
import package.part
assert package is first and package.count == 1 and package.part is first.part
assert package.__spec__.loader is package.__loader__ is not None
assert {*shown[1]} == {"package", "package.part", "sub_of_stdlib"}
assert importlib.reload(package).count == 2
""")


def test_importers_that_are_lazy_or_early(run):
    run("""
import package
true, first = package.__spec__, package
hide("other")
spec = importlib.util.find_spec("package")
spec.loader = importlib.util.LazyLoader(spec.loader)
lazy = importlib.util.module_from_spec(spec)
sys.modules["package"] = lazy
spec.loader.exec_module(lazy)
assert lazy.count == 1 and lazy is first and package.__spec__ is true
import other
assert other.__spec__.name == "other" and importlib.util.find_spec("package") is true
""")


def test_threads_that_import_at_once(run):
    run("""
import package, threading
hide("other", "sub_of_stdlib")
sys.setswitchinterval(1e-6)
failed = []
def load(name):
    try:
        assert __import__(name) is sys.modules[name]
    except BaseException as error:
        failed.append(error)
threads = [
    threading.Thread(target=load, args=(name,))
    for name in ("package", "other", "sub_of_stdlib", "package", "other") * 4
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed and package.count == 1, failed
""")


def test_a_logger_from_before_stays(run):
    run("""
assert "torch" not in sys.modules
import package
hide()
assert "package.part" not in logging.root.manager.loggerDict
""")


def test_another_package_shows_all(run):
    run("""
import package
hide()
import sub_of_stdlib
assert "package" in sys.modules and "other" in sys.modules
""")


def test_an_interrupted_import_is_repeated(run):
    run("""
import package
def interrupted(names):
    shown.append(names)
    if len(shown) == 1:
        raise KeyboardInterrupt
first = package
HiddenModules(packages() - before, (), interrupted)
try:
    import package
except KeyboardInterrupt:
    import package
assert package is first and package.count == 1
""")


def test_loggers(run):
    run("""
import logging.config
import package
module = logging.getLogger("package.part")
module.addHandler(logging.NullHandler())
deep = logging.getLogger("package.part.deep")
hide()
assert not logging.root.manager.loggerDict
logging.config.dictConfig({"version": 1, "loggers": {"package": {"level": "DEBUG"}}})
own = logging.getLogger("package.part.deep")
own.propagate = False
import package
assert logging.getLogger("package.part") is module
assert not module.disabled and module.level == logging.ERROR and module.handlers
assert module.parent.name == "package" and module.parent.level == logging.DEBUG
assert logging.getLogger("package.part.deep") is deep and not deep.propagate
own.setLevel("INFO")
assert deep.level == logging.INFO and deep.parent.name == "package.part"
""")
