"""Variables and time limits are declared once, with what they mean."""

from __future__ import annotations

import ast
import re

import pytest

from tests.support import ROOT
from tests.support.python_programs import load
from tests.support.syntax import PACKAGE, modules

CONSTANTS = load(ROOT / "docs" / "write_constants.py")
VARIABLES, LIMITS = [*CONSTANTS.variables()], [*CONSTANTS.limits()]
DECLARED = [name for each in VARIABLES for name in each.values]

# A text that can only be a variable; a single word can also be another name.
FORM = re.compile("[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
NO_VARIABLES = {
    "MPI_LOCAL",  # the beginning of several names
    "PBS_INTERACTIVE",  # a value of PBS_ENVIRONMENT
    "PCI_BUS_ID",  # a value of CUDA_DEVICE_ORDER
    "SC_CLK_TCK",  # a name of sysconf(3)
}

ELSEWHERE = "torchrun_hpc.programs"  # programs import nothing
# This module is below PBS's. Its line for PBS jobs names PBS's variable.
ALLOWED = {("torchrun_hpc.schedulers.openmpi", "PBS_JOBID")}


@pytest.mark.parametrize("each", VARIABLES, ids=lambda each: each.values[0])
def test_each_variable_has_an_owner_and_a_meaning(each):
    assert each.group
    assert re.fullmatch(r"[A-Z].*[.0-9]", each.meaning), "a comment right before it"


def test_each_variable_is_declared_once():
    assert len(DECLARED) == len({*DECLARED})


def is_declaration(node, name):
    """Return whether a statement declares variables: see docs/write_constants.py."""
    is_place = name == "torchrun_hpc.variables" or ".schedulers." in name
    match node:
        case ast.Assign([ast.Name(target)], ast.Constant() | ast.Tuple()):
            return is_place and not target.startswith("_")
    return False


def texts(name):
    """Yield the texts of a module besides docstrings and declarations."""
    outside = [n for n in modules()[name].body if not is_declaration(n, name)]
    nodes = [node for statement in outside for node in ast.walk(statement)]
    docstrings = {n.value for n in nodes if isinstance(n, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and node not in docstrings:
            yield str(node.value)


def written(text):
    """Return the variables in a text: all of it, or its words that have a ``_``."""
    if text in DECLARED or (FORM.fullmatch(text) and text not in NO_VARIABLES):
        return {text}
    return {*re.findall(r"\w+_\w+", text)}.intersection(DECLARED)


def test_no_variable_is_written_elsewhere():
    names = [name for name in modules() if not name.startswith(ELSEWHERE)]
    found = {(n, each) for n in names for text in texts(n) for each in written(text)}
    assert found == ALLOWED


def test_the_environment_is_read_by_declared_names():
    keys = []
    for name in (name for name in modules() if not name.startswith(ELSEWHERE)):
        for node in ast.walk(modules()[name]):
            match node:
                case ast.Call(
                    ast.Attribute(of, "get" | "pop"), [ast.Constant(key), *_]
                ):
                    keys += [(name, key)] * is_environment(of)
                case ast.Subscript(of, ast.Constant(key)):
                    keys += [(name, key)] * is_environment(of)
    assert not keys


def is_environment(of):
    return bool(re.search(r"\benv(iron|ironment\(\))?$", ast.unparse(of)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("RANK", {"RANK"}),
        ("MY_VARIABLE", {"MY_VARIABLE"}),
        ("export MASTER_ADDR=HOST", {"MASTER_ADDR"}),
        ("the RANK of a worker", set()),
        ("the SLURM_* variables", set()),
        ("TORCH_LOGS_OF_ALL", {"TORCH_LOGS_OF_ALL"}),
        ("a_TORCH_LOGS b", set()),
    ],
)
def test_what_counts_as_written(text, expected):
    assert written(text) == expected


# --- time limits ----------------------------------------------------------------------

# Numbers that are no limits of the launcher.
NO_LIMITS = {
    "doctor.operations._FACTORS",  # of numbers
    "doctor.place._MOST_SECONDS",  # of a user's limit
    "doctor.summary._LARGE",  # bytes
    "doctor.summary._SLOWER",  # a factor
    "failures.failure._LATEST",  # a date
    "options.rdzv_conf._MOST_SECONDS",  # of a user's limit
    "stacks.sampling._WORKING",  # a share of the CPU time
}
# Pure functions that compare measured values: their numbers are shares and differences.
JUDGES = ("torchrun_hpc.doctor.checks", "torchrun_hpc.doctor.judgement")
SAYS_SECONDS = re.compile(r"\bseconds?\b", re.IGNORECASE)
IS_LIMIT = re.compile("TIMEOUT|INTERVAL|PAUSE|DELAY|SECONDS|PATIENCE")


@pytest.mark.parametrize("each", LIMITS, ids=lambda each: each.name)
def test_each_limit_has_a_reason_and_an_end(each):
    assert each.group
    assert [type(value) for value in each.values] in ([int], [float])
    assert re.fullmatch(r"[A-Z].*\. At its end, .*\.", each.meaning)


def test_each_limit_is_declared_once_and_used():
    names = [each.name for each in LIMITS]
    assert len(names) == len({*names})
    nodes = [node for tree in modules().values() for node in ast.walk(tree)]
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert {*names} <= used


def seconds(name):
    """Yield the constants of a module that are seconds.

    They are floats, or their names or comments say that they are seconds.
    """
    path = PACKAGE.parent.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    lines = path.read_text(encoding="utf-8").splitlines()
    for node in modules()[name].body:
        if not (isinstance(node, ast.Assign) and is_number(node.value)):
            continue
        before = lines[node.lineno - 2]
        comments = lines[node.lineno - 1] + before * before.startswith("#")
        is_float = "." in ast.unparse(node.value)
        says_so = SAYS_SECONDS.search(comments)
        for target in map(ast.unparse, node.targets):
            if is_float or says_so or IS_LIMIT.search(target):
                yield f"{name}.{target}".removeprefix("torchrun_hpc.")


def is_number(value):
    """Return whether a value consists of numbers, without names and texts."""
    parts = [p for p in ast.walk(value) if isinstance(p, ast.Constant | ast.Name)]
    values = [getattr(part, "value", None) for part in parts]
    return bool(values) and all(isinstance(value, int | float) for value in values)


def test_no_limit_is_declared_elsewhere():
    places = (ELSEWHERE, "torchrun_hpc.limits", *JUDGES)
    names = [name for name in modules() if not name.startswith(places)]
    assert {limit for name in names for limit in seconds(name)} == NO_LIMITS
