"""Read a file of sites, and say exactly what is wrong in it.

Every fault is one `LaunchError` with the file, the line and the key.
"""

from __future__ import annotations

import bisect
import re
import sys
from typing import TYPE_CHECKING, Any

from torchrun_hpc import files
from torchrun_hpc.errors import LaunchError, choices
from torchrun_hpc.sites.site import BIND_NONE, BINDINGS, Sign, Site, is_module

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

# With this name the user switches all sites off: no site can have it.
NONE = "none"

# The keys of each table, and whether they are required.
_FILE = {"centre": True}
_SITE = {
    "title": True,
    "source": True,
    "recognise": False,
    "hosts": False,
    "variables": False,
    "preload": False,
    "bind": False,
}
_HOSTS = {"pattern": True, "replacement": True, "examples": True}
_SIGN = {"variable": False, "values": False, "pattern": False, "host": False}
_SIGNS = ({"variable", "values"}, {"variable", "pattern"}, {"host"})

_SITE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
_VARIABLE_NAME = re.compile(r"[A-Z_][A-Z0-9_]*")

# Gloo compares whole names: no prefix, no ^, no =, no blanks.
_GLOO = "GLOO_SOCKET_IFNAME"
_GLOO_VALUE = re.compile(r"[^\s,^=]+(,[^\s,^=]+)*")

# Decided by a launch, or taken from the command line.
_DECIDED = re.compile("PET_.*|MASTER_.*|TORCHELASTIC_.*|OMP_NUM_THREADS")

_LARGEST = 20_000  # bytes

# What matters for where a statement ends. Source: toml.io/en/v1.0.0. Quotes may stand
# in front of the three that end a string.
_TOKEN = re.compile(
    r""""{3}(?:\\.|[^\\])*?"{3,5}|'{3}.*?'{3,5}"""
    r"""|"(?:\\.|[^\\"])*"|'[^']*'|#[^\n]*|[][{}\n]""",
    re.DOTALL,
)

_BARE_KEY = re.compile(r"[\w-]+", re.ASCII)

_Key = tuple[str, ...]


def read(path: Path, *, everywhere: bool) -> tuple[Site, ...]:
    """Read the sites of a file, in the order in which they stand there.

    Raises:
        LaunchError: The file cannot be read, or something in it is wrong. It says so
            for all nodes if they find the same file everywhere.
    """
    return _SiteFile(path, everywhere=everywhere).sites()


class _SiteFile:
    """Reads and checks one file; its messages name file, line and key."""

    def __init__(self, path: Path, *, everywhere: bool) -> None:
        self.path = path
        self.everywhere = everywhere
        self.text = ""

    def sites(self) -> tuple[Site, ...]:
        table = self._table()
        systems = {k: v for k, v in table.items() if isinstance(v, dict)}
        rest = {k: v for k, v in table.items() if k not in systems}
        self._check_keys((), rest, _FILE)
        centre = self._text(("centre",), rest["centre"])
        if not systems:
            raise self._wrong((), "there is no system: begin one with [NAME]")
        return tuple(self._site(name, systems[name], centre) for name in systems)

    def _table(self) -> dict[str, Any]:
        try:
            data = files.read(self.path, _LARGEST)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise LaunchError(
                "HPC041",
                f"{self.path} cannot be read: {reason}. Mend that, or type "
                f"--hpc-site={NONE}",
            ) from None  # it may be missing on this node only
        try:
            self.text = data.decode().replace("\r\n", "\n")
            return _table_of(self.text)
        except (ValueError, RecursionError) as error:
            if isinstance(error, UnicodeDecodeError):
                line = data.count(b"\n", 0, error.start) + 1
            else:
                stated = re.search(r"at line (\d+)", str(error))
                line = int(stated[1]) if stated else self.text.count("\n") + 1
            text = f"this is not TOML: {error}"
            raise self._fault("HPC042", (), text, line) from None

    def _site(self, name: str, table: dict[str, Any], centre: str) -> Site:
        key = (name,)
        if not _SITE_NAME.fullmatch(name) or name == NONE:
            known = "lower-case letters, digits, - and _"
            raise self._wrong(key, f"a site's name is of {known}; not {NONE}")
        self._check_keys(key, table, _SITE)
        site = Site(
            name=name,
            title=self._text((*key, "title"), table["title"]),
            centre=centre,
            source=self._text((*key, "source"), table["source"]),
            file=str(self.path),
            signs=self._signs((*key, "recognise"), table.get("recognise", [])),
            variables=self._variables((*key, "variables"), table.get("variables", {})),
            preload=self._modules((*key, "preload"), table.get("preload", [])),
            bind=self._binding((*key, "bind"), table.get("bind", BIND_NONE)),
            **self._hosts((*key, "hosts"), table.get("hosts")),
        )
        for host, fast in site.examples.items():
            for given in (host, fast):
                if (rewritten := site.rewrite(given)) != fast:
                    raise self._fault(
                        "HPC047",
                        (*key, "hosts", "examples", host),
                        f"the rule makes {rewritten!r} of {given!r}, not {fast!r}; and "
                        "what has been rewritten must stay as it is",
                    )
        return site

    def _hosts(self, key: _Key, table: Any) -> dict[str, Any]:
        if table is None:
            return {}
        self._check_keys(key, table, _HOSTS)
        its_pattern, its_replacement, its_examples = ((*key, k) for k in _HOSTS)
        pattern = self._text(its_pattern, table["pattern"])
        replacement = table["replacement"]
        if replacement != "":  # which leaves the part out
            self._text(its_replacement, replacement)
        self._check_pattern(its_pattern, pattern)
        self._check_pattern(its_replacement, pattern, replacement)
        examples = self._strings(its_examples, table["examples"])
        if not examples:
            raise self._wrong(its_examples, "give at least one: NODE = its fast name")
        return {"pattern": pattern, "replacement": replacement, "examples": examples}

    def _signs(self, key: _Key, entries: Any) -> tuple[Sign, ...]:
        if not isinstance(entries, list):
            raise self._wrong(key, "this is a list: [{ variable = …, values = […] }]")
        return tuple(self._sign(key, entry) for entry in entries)

    def _sign(self, key: _Key, entry: Any) -> Sign:
        self._check_keys(key, entry, _SIGN)
        if set(entry) not in _SIGNS:
            known = "variable and values, or variable and pattern, or host"
            raise self._wrong(key, f"each entry has {known}")
        variable = entry.get("variable", "")
        if "variable" in entry:
            self._check_variable(key, variable)
        if "values" in entry:
            values = entry["values"]
            if not isinstance(values, list) or not values:
                raise self._wrong(key, 'values is a list: ["juwels", "jusuf"]')
            return Sign(variable, tuple(self._text(key, value) for value in values))
        pattern = self._text(key, entry.get("pattern", entry.get("host")))
        self._check_pattern(key, pattern)
        return Sign(variable, pattern=pattern)

    def _variables(self, key: _Key, table: Any) -> dict[str, str]:
        variables = self._strings(key, table)
        for name, value in variables.items():
            self._check_variable((*key, name), name)
            if not value.isprintable():
                raise self._wrong((*key, name), "the value has unprintable characters")
            if name == _GLOO and not _GLOO_VALUE.fullmatch(value):
                text = "gloo takes exact names of interfaces, separated by commas"
                refused = "no prefix, no ^, no =, no blanks"
                raise self._wrong((*key, name), f"{text}: {refused}")
        return variables

    def _binding(self, key: _Key, value: Any) -> str:
        if self._text(key, value) not in BINDINGS:
            text = f"{value!r} is no way to bind. {choices(value, BINDINGS)}"
            raise self._wrong(key, text)
        return str(value)

    def _modules(self, key: _Key, names: Any) -> tuple[str, ...]:
        if not isinstance(names, list):
            raise self._wrong(key, 'this is a list of modules: ["torch"]')
        for name in names:
            if not is_module(self._text(key, name)):
                raise self._wrong(key, f"{name!r} is no name of a module")
        return tuple(names)

    def _check_variable(self, key: _Key, name: Any) -> None:
        if not _VARIABLE_NAME.fullmatch(self._text(key, name)):
            raise self._wrong(key, f"{name!r} is not a variable: A to Z, 0 to 9, _")
        if key[1:2] == ("variables",) and _DECIDED.fullmatch(name):
            raise self._wrong(key, f"{name} is torchrun's, or the user's, to set")

    def _strings(self, key: _Key, table: Any) -> dict[str, str]:
        if not isinstance(table, dict):
            raise self._wrong(key, "this is a table: NAME = VALUE")
        return {name: self._text((*key, name), value) for name, value in table.items()}

    def _text(self, key: _Key, value: Any) -> str:
        if not isinstance(value, str):
            raise self._wrong(key, "this is not text: put it into quotes")
        if not value:
            raise self._wrong(key, "this is empty")
        return value

    def _check_keys(self, key: _Key, table: Any, known: Mapping[str, bool]) -> None:
        if not isinstance(table, dict):
            raise self._wrong(key, f"this is a table, with {', '.join(known)}")
        for name in table:
            if name not in known:
                text = f"there is no such key. {choices(name, known)}"
                raise self._fault("HPC043", (*key, name), text)
        for name, required in known.items():
            if required and name not in table:
                raise self._fault("HPC044", (*key, name), "this is missing")

    def _check_pattern(self, key: _Key, pattern: str, replacement: str = "") -> None:
        try:
            # The replacement is parsed even if nothing matches.
            re.compile(pattern).sub(replacement, "")
        except (re.error, IndexError, OverflowError, RecursionError) as error:
            text = f"{replacement or pattern!r} does not work: {error}"
            raise self._fault("HPC046", key, text) from None

    def _wrong(self, key: _Key, text: str) -> LaunchError:
        return self._fault("HPC045", key, text)

    def _fault(self, code: str, key: _Key, text: str, line: int = 0) -> LaunchError:
        name = ".".join(k if _BARE_KEY.fullmatch(k) else f'"{k}"' for k in key)
        place = f"{self.path}, line {line or line_of(self.text, key)}"
        where = f"{place}, {name}" if name else place
        message = f"{where}: {text}. Mend it, or type --hpc-site={NONE}"
        return LaunchError(code, message, everywhere=self.everywhere)


def line_of(text: str, key: _Key) -> int:
    """Return the line on which a key begins, else its table, else the first.

    The parser keeps no positions. But the first statements that have the key together
    end with its own.

    Args:
        text: A file that parses, with line feeds only.
        key: Names of the tables, and of the key in the last.
    """
    table = _table_of(text)
    while key and not _has(table, key):
        key = key[:-1]
    ends = [0, *_ends(text)]
    found = bisect.bisect_left(
        ends, x=True, key=lambda end: _has(_table_of(text[:end]), key)
    )
    return text.count("\n", 0, ends[max(found - 1, 0)]) + 1


def _ends(text: str) -> Iterator[int]:
    """Yield where statements end: at line feeds outside of strings and brackets."""
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if token[0] == "\n" and not depth:
            yield token.end()
    yield len(text)


def _table_of(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: This is none.
        RecursionError: It is nested too deeply.
    """
    # Slow to import, and direct mode on one node reads no site.
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415
    else:
        import tomli as tomllib  # noqa: PLC0415
    return tomllib.loads(text)


def _has(table: Any, key: _Key) -> bool:
    for name in key:
        if not isinstance(table, dict) or name not in table:
            return False
        table = table[name]
    return True
