"""What the linters do not check of the structure.

As a program it prints numbers, of this package or of another checkout's::

    python tests/unit/test_structure.py [OTHER_CHECKOUT/torchrun_hpc]
"""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "torchrun_hpc"


def modules_of(package):
    """Return the syntax trees of a package's modules, by their names."""
    trees = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        text = path.read_text(encoding="utf-8")
        trees[".".join(parts).removesuffix(".__init__")] = ast.parse(text, path)
    return trees


def imports_of(trees):
    """Return the modules that each module imports, at any time or for its types."""
    found = {name: set() for name in trees}
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found[name].update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                full = (f"{node.module}.{alias.name}" for alias in node.names)
                found[name].update(n if n in trees else node.module for n in full)
    # Of the package itself it is its version; Python imports it with any module.
    known = trees.keys() - {PACKAGE.name}
    return {name: targets & known - {name} for name, targets in found.items()}


MODULES = modules_of(PACKAGE)
each_module = pytest.mark.parametrize("name", MODULES)


def circle_of(imports):
    """Return modules of which each imports the next, and the last one the first."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return " imports ".join(reversed(error.args[1]))
    return ""


def test_there_is_no_circle():
    assert not circle_of(imports_of(MODULES))


def top_level(package):
    paths = [p for p in package.iterdir() if p.suffix == ".py" or p.is_dir()]
    return {path.stem for path in paths} - {"__init__", "__main__", "__pycache__"}


def test_the_top_level_is_small():
    """A command, a folder of its own with a ``__main__.py``, is not counted."""
    commands = {path.parent.name for path in PACKAGE.glob("*/__main__.py")}
    assert len(top_level(PACKAGE) - commands) <= 15, "15 modules and folders"


TEST_FILES = sorted(TESTS.rglob("test_*.py"))

# Of those whose own file of tests has another name, or is of several modules.
TESTED_IN = {
    "": "dropin/test_describe.py",
    "commandline.rdzv_conf": "dropin/test_rdzvconf.py",
    "commandline.torchrun_parser": "dropin/test_options.py",
    "commandline.validation": "dropin/test_options.py",
    "doctor.__main__": "cluster/test_doctor.py",
    "doctor.board": "cluster/test_doctor.py",
    "doctor.examiner": "cluster/test_doctor.py",
    "doctor.place": "cluster/test_doctor.py",
    "launching.agent": "dropin/test_launch.py",
    "launching.starters": "unit/test_import.py",
    "launching.environment": "unit/launching/test_start.py",
    "launching.observer": "cluster/test_spares.py",
    "launching.exit_status": "cluster/test_outcome.py",
    "launching.preflight": "unit/schedulers/test_pmi.py",
    "main": "unit/test_import.py",
    "__main__": "unit/test_import.py",
    "planning.inputs": "unit/planning/test_plan.py",
    "planning.launch_plan": "unit/planning/test_plan.py",
    "planning.topology": "unit/planning/test_binding.py",
    "planning.messages": "unit/planning/test_several_nodes.py",
    "rendezvous.connection": "dropin/test_rendezvous_handler.py",
    "rendezvous.handler": "dropin/test_rendezvous_handler.py",
    "rendezvous.store": "dropin/test_rendezvous_handler.py",
    "spares.handler": "cluster/test_spares.py",
    "worker.fork_server": "unit/launching/test_preloading.py",
    "worker.imports": "unit/launching/test_preloading.py",
    "schedulers": "unit/schedulers/test_detection.py",
    "sites": "unit/sites/test_sites.py",
    "sites.site": "unit/sites/test_sites.py",
}
PATCHES = "dropin/torch_compat/test_registry.py"

DECISIONS = (ast.If, ast.IfExp, ast.BoolOp, ast.While, ast.Match)


def functions_of(tree):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


@each_module
def test_a_module_that_decides_something_has_a_file_of_tests(name):
    inner = name.partition(".")[2]
    nodes = (node for f in functions_of(MODULES[name]) for node in ast.walk(f))
    if not any(isinstance(node, DECISIONS) for node in nodes):
        return
    *folders, last = inner.split(".")
    usual = {*(folders[:1] or ["unit"]), "dropin"}
    known = TESTED_IN.get(inner, PATCHES if "patches" in folders else "-")
    file = f"test_{last.strip('_')}.py"
    assert (TESTS / known).is_file() or usual & {
        path.parent.name for path in TEST_FILES if path.name == file
    }


def names_in(tree):
    """Yield the names in a module: where they stand, and without underscores."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):  # the name is of what is called
            continue
        for field in ("id", "attr", "arg", "name"):
            if isinstance(found := getattr(node, field, None), str):
                yield node, found.strip("_")


EXPRESSIONS = (
    *(ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda),
)


@each_module
def test_names_are_words(name):
    tree = MODULES[name]
    short = [node for node in ast.walk(tree) if isinstance(node, EXPRESSIONS)]
    inside = {id(part) for node in short for part in ast.walk(node)}
    letters = [
        f"line {node.lineno}: {found}"
        for node, found in names_in(tree)
        if len(found) == 1 and id(node) not in inside
    ]
    assert not letters


# What decides the mode, and where it may be asked: until the mode is chosen.
OF_THE_MODE = {"has_several_tasks", "asks_for_one_node", "check_started_right"}
MAY_ASK = {"planning.mode", "schedulers.job", "launching.starters", "main"}


def test_the_mode_is_decided_in_one_place():
    asking = {
        name
        for name, tree in MODULES.items()
        for _, word in names_in(tree)
        if word in OF_THE_MODE
    }
    assert asking <= {f"torchrun_hpc.{name}" for name in MAY_ASK}


# Words that only we used, for which there is a usual one.
OLD_WORDS = {
    *("q", "made", "said", "told", "speaks", "identity", "wording", "beat", "hello"),
    *("guessed_head", "same_everywhere", "has_talked", "fell_back", "place_of"),
    *("look_around", "meeting", "stranger", "grammar", "describing", "tied"),
    *("Value", "Placement", "Start", "View", "Meeting", "Terms", "Hello"),
    "SOURCES",
}


def test_old_words_do_not_come_back():
    words = {
        (name, word) for name, tree in MODULES.items() for _, word in names_in(tree)
    }
    words |= {(name, name.rpartition(".")[2]) for name in MODULES}
    old = sorted(f"{name}: {word}" for name, word in words if word in OLD_WORDS)
    assert not old, "\n".join(old)


def print_numbers(package):
    """Count, for a comparison of two states."""
    trees = modules_of(package)
    imports = imports_of(trees)
    arrows = {(a, b) for a, targets in imports.items() for b in targets}
    folders = {tuple((f"{n}.".split("."))[1] for n in arrow) for arrow in arrows}
    lines = [
        (len(path.read_text(encoding="utf-8").splitlines()), path.name)
        for path in package.rglob("*.py")
    ]
    functions = [
        (node.end_lineno - node.lineno + 1, f"{name}.{node.name}")
        for name, tree in trees.items()
        for node in functions_of(tree)
    ]
    print(f"{sum(n for n, _ in lines)} lines in {len(lines)} modules")
    print(f"{len(top_level(package))} modules and folders at the top level")
    print(f"{len(arrows)} imports of one module by another")
    print(f"{sum(a != b for a, b in folders)} imports of one folder by another")
    print("circle:", circle_of(imports) or "none")
    print("longest module:", *max(lines))
    print("longest function:", *max(functions))


if __name__ == "__main__":
    print_numbers(Path(sys.argv[1]) if len(sys.argv) > 1 else PACKAGE)
