"""What the linters do not check of the structure."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter

from tests.support import ROOT
from tests.support.syntax import PACKAGE, modules


def imports(name):
    """Return the modules that a module imports, at any time or for its types."""
    found: set[str] = set()
    for node in ast.walk(modules()[name]):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            found.update(n if n in modules() else str(node.module) for n in full)
    # Of the package itself it is its version; Python imports it with any module.
    return found & modules().keys() - {PACKAGE.name, name}


def test_there_is_no_circle():
    circle = []
    try:
        TopologicalSorter({name: imports(name) for name in modules()}).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle


def room_of(name):
    """Return the folder of a module, or the module; a command is a room of its own."""
    parts = name.removeprefix(f"{PACKAGE.name}.").split(".")
    return ".".join(parts) if parts[-1] == "__main__" else parts[0]


def test_there_is_no_circle_of_folders():
    rooms: dict[str, set[str]] = {room_of(name): set() for name in modules()}
    for name in modules():
        rooms[room_of(name)] |= {*map(room_of, imports(name))} - {room_of(name)}
    circle = []
    try:
        TopologicalSorter(rooms).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle


def classes(name):
    """Return the classes of a module, by their names."""
    body = modules()[name].body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


def private_names(of):
    """Return the private names that a class defines, or uses of itself."""
    for node in ast.walk(of):
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from [node.attr] * (node.value.id == "self")


def test_no_class_uses_private_names_of_a_class_of_another_module():
    used = []
    for name in modules():
        others = [classes(other) for other in imports(name)]
        for each in classes(name).values():
            own = {n for n in private_names(each) if n[0] == "_" != n[1]}
            for base in (node.id for node in each.bases if isinstance(node, ast.Name)):
                found = [module[base] for module in others if base in module]
                theirs = {n for other in found for n in private_names(other)}
                used += [(each.name, base, n) for n in own & theirs]
    assert not used


def test_the_top_level_is_small():
    """A command, a folder of its own with a ``__main__.py``, is not counted."""
    paths = [p for p in PACKAGE.iterdir() if p.suffix == ".py" or p.is_dir()]
    names = {path.stem for path in paths} - {"__init__", "__main__", "__pycache__"}
    commands = {path.parent.name for path in PACKAGE.glob("*/__main__.py")}
    assert len(names - commands) <= 22, "22 modules and folders"


PRONOUNS = {"found", "own", "known", "here", "where", "seen"}


def names_of_values(tree):
    """Yield the names of fields, parameters and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(name) | ast.Attribute(attr=name):
                yield name.strip("_")
            case ast.ClassDef():
                fields = (x for x in node.body if isinstance(x, ast.AnnAssign))
                yield from (ast.unparse(field.target) for field in fields)


def test_values_are_named_by_what_they_are():
    used = [(n, x) for n, tree in modules().items() for x in names_of_values(tree)]
    assert [each for each in used if each[1] in PRONOUNS] == []


def test_no_helper_of_the_tests_has_the_name_of_a_module():
    helpers = {path.stem for path in (ROOT / "tests" / "support").rglob("*.py")}
    names = {part for name in modules() for part in name.split(".")}
    assert helpers & names <= {"__init__"}


def test_no_two_classes_share_a_name():
    """Each part of the agent has an `Extension`; no other class has this name."""
    names = [name for module in modules() for name in classes(module)]
    assert sorted(names) == sorted({*names})
    every = (node for tree in modules().values() for node in ast.walk(tree))
    every_name = [node.name for node in every if isinstance(node, ast.ClassDef)]
    repeated = {name for name in every_name if every_name.count(name) > 1}
    assert repeated == {"Extension"}


# What decides the mode, and where it may be asked: until the mode is chosen.
OF_THE_MODE = {"has_several_tasks", "asks_for_one_node", "check_started_right"}
MAY_ASK = {
    "options.options",
    "planning.mode",
    "schedulers.job",
    "auto",
    "main",
}


def test_the_mode_is_decided_in_one_place():
    asking = {
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        for field in ("id", "attr", "name")
        if getattr(node, field, None) in OF_THE_MODE
    }
    assert asking <= {f"torchrun_hpc.{name}" for name in MAY_ASK}
