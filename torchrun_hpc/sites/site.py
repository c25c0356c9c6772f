"""A computing centre's system, or a cloud's: its facts and markers, and its file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrun_hpc import files
from torchrun_hpc.errors import LaunchError, choices
from torchrun_hpc.options.values import AUTH, BINDINGS, NONE, is_module
from torchrun_hpc.variables import GLOO, RANK, WORLD_SIZE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    # Takes a key, for messages, and its value; returns the checked value.
    Reader = Callable[[str, Any], Any]
    # The keys of a table, and the reader of each value.
    Keys = Mapping[str, Reader]


@dataclass(frozen=True)
class Marker:
    """A marker of a site: a variable's value, a host name, or an existing file.

    Names such as ``SYSTEMNAME`` are too common to be a marker without their value.
    """

    variable: str = ""  # environment variable; empty for the host name
    values: tuple[str, ...] = ()
    pattern: str = ""  # regular expression for the whole value, or the whole host name
    file: str = ""  # path of a file or folder; otherwise empty

    def match(self, environ: Mapping[str, str], host: str) -> str:
        """Return the matching value: ``SYSTEMNAME=juwels``; empty without a match.

        ``host`` is the head node, or this machine. An empty variable counts as unset.
        """
        if self.file:
            return str(self) if files.exists(self.file) else ""
        text = environ.get(self.variable, "") if self.variable else host
        is_match = text in self.values or re.fullmatch(self.pattern, text)
        return self._with_value(text) if text and is_match else ""

    def __str__(self) -> str:
        """Describe it: ``SYSTEMNAME=juwels or jusuf``."""
        if self.file:
            return f"file {self.file}"
        return self._with_value(" or ".join(self.values) or f"'{self.pattern}'")

    def _with_value(self, value: str) -> str:
        return f"{self.variable}={value}" if self.variable else f"host name {value}"


@dataclass(frozen=True)
class Site:
    """A system of a computing centre, or several similar ones.

    ``examples`` are node names, and their names on the fast network. Each of
    ``variables`` is set if it is unset. ``profile`` is the path of a file on each node.
    Its values of ``profile_names`` come before ``variables``; see `profile`.
    ``options`` are defaults of ``--hpc-*`` options, as text.
    """

    name: str  # as passed to ``--hpc-site``
    title: str  # names of the systems
    centre: str
    source: str  # the page on which the centre documents the facts
    file: str  # path of the TOML file that describes it
    markers: tuple[Marker, ...] = ()  # how it is recognised; empty if only by name
    pattern: str = ""  # regular expression for the part of a node's name to rewrite
    replacement: str = ""  # as for ``re.sub``
    examples: Mapping[str, str] = field(default_factory=dict, hash=False)
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)
    profile: str = ""
    profile_names: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    found_by: str = ""  # the marker or setting that chose it: ``SYSTEMNAME=juwels``

    def rewrite(self, host: str) -> str:
        """Return a node's name on the fast network; idempotent."""
        if not self.pattern:
            return host
        return re.sub(self.pattern, self.replacement, host, count=1)


# --- site files -----------------------------------------------------------------------

REMEDY = f"or pass --hpc-site={NONE}"

_LARGEST = 20_000  # bytes

# Options whose defaults a site can set.
_OPTIONS = ("preload", "bind", "auth", "key_file")

_NAME_FORM = re.compile(rf"(?!{NONE}$)[a-z0-9][a-z0-9_-]*")
_VARIABLE_FORM = re.compile(r"[A-Z_][A-Z0-9_]*")

# Only a launch or the user sets these.
_DECIDED = re.compile(
    rf"(PET|MASTER|TORCHELASTIC|OMP_NUM)_.*|(LOCAL_)?({RANK}|{WORLD_SIZE})"
)

# Gloo compares whole names: no prefix, no ^, no =, no blanks.
_GLOO_FORM = re.compile(r"[^\s,^=]+(,[^\s,^=]+)*")


def read_sites(path: Path, *, everywhere: bool) -> tuple[Site, ...]:
    """Read the sites of a file, in its order.

    If all nodes find the same file (``everywhere``), one of them reports a wrong file.
    """
    try:
        data = files.read(path, _LARGEST)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        text = f"{path} cannot be read: {reason}. Correct that, {REMEDY}"
        raise LaunchError("HPC041", text) from None  # others may be able to
    try:
        return _sites(str(path), data)
    except LaunchError as fault:
        fault.everywhere = everywhere
        raise


def _sites(file: str, data: bytes) -> tuple[Site, ...]:
    try:
        table = files.from_toml(data.decode())
    except (ValueError, RecursionError) as error:
        raise _wrong(file, f"this is not TOML: {error}") from None
    systems = {name: _site for name, value in table.items() if isinstance(value, dict)}
    if not systems:
        raise _wrong(file, "no system is described: begin its table with [NAME]")
    keys: Keys = {**systems, "centre": _WORDS}
    values = _table(keys, file, table, required=keys, dot=", ")
    centre = values.pop("centre")
    for name in values:
        _NAME(f"{file}, {name}", name)
    return tuple(Site(k, centre=centre, file=file, **v) for k, v in values.items())


def _site(key: str, table: Any) -> dict[str, Any]:
    """Return the fields of `Site`."""
    site = _table(_SITE, key, table, required=("title", "source"))
    markers, rule = site.pop("recognise", ()), site.pop("hosts", {})
    profile = site.pop("profile", {})
    options = {f"hpc_{name}": site.pop(name) for name in _OPTIONS if name in site}
    if any(marker.file for marker in markers) and (rule or options):
        text = "nodes can differ in a file, so a marker file allows no hosts, "
        raise _wrong(key, f"{text}{', '.join(_OPTIONS)}. Use another marker")
    return {"markers": markers, "options": options, **rule, **profile, **site}


def _marker(key: str, table: Any) -> Marker:
    marker = _table(_MARKER, key, table)
    if {name for name, value in marker.items() if value} not in _MARKERS:
        text = "give variable and values, variable and pattern, host, or file"
        raise _wrong(key, text)
    if "host" in marker:
        return Marker(pattern=marker["host"])
    return Marker(**marker)


def _rule(key: str, table: Any) -> dict[str, Any]:
    """Return the fields of `Site` for the host rule, which must fit its examples."""
    rule = _table(_HOSTS, key, table, required=_HOSTS)
    pattern, replacement = rule["pattern"], rule["replacement"]
    _pattern(f"{key}.replacement", pattern, replacement)
    if not rule["examples"]:
        raise _wrong(f"{key}.examples", "give at least one: NODE = its fast name")
    for name, fast in rule["examples"].items():
        for host in (name, fast):
            made = re.sub(pattern, replacement, host, count=1)
            if made != fast:
                text = f"the rule turns {host!r} into {made!r}, not {fast!r}"
                raise _wrong(f"{key}.examples", text)
    return rule


def _variables(key: str, table: Any) -> dict[str, str]:
    variables = _each(_named, _VALUE, key, table)
    if GLOO in variables:
        _GLOO_VALUE(f"{key}.{GLOO}", variables[GLOO])
    return variables


def _profile(key: str, table: Any) -> dict[str, Any]:
    profile = _table(_PROFILE, key, table, required=_PROFILE)
    return {"profile": profile["file"], "profile_names": profile["names"]}


def _named(key: str, value: Any) -> str:
    name = _VARIABLE(key, value)
    if _DECIDED.fullmatch(name):
        raise _wrong(key, f"only torchrun or the user sets {name}")
    return name


def _modules(key: str, value: Any) -> str:
    return ",".join(_list(_MODULE, key, value))


def _table(
    keys: Keys, key: str, table: Any, required: Iterable[str] = (), dot: str = "."
) -> dict[str, Any]:
    """Read a table with these keys; in messages, ``dot`` joins it to its keys."""
    if not isinstance(table, dict):
        raise _wrong(key, f"this is a table, with {', '.join(keys)}")
    for name in [*table, *required]:
        if name not in keys:
            text = f"there is no such key. {choices(name, keys)}"
            raise _wrong(f"{key}{dot}{name}", text)
        if name not in table:
            raise _wrong(f"{key}{dot}{name}", "this is missing")
    return {name: keys[name](f"{key}{dot}{name}", table[name]) for name in table}


def _each(name: Reader, value: Reader, key: str, table: Any) -> dict[str, Any]:
    """Read a table whose keys are free, such as names of variables."""
    if not isinstance(table, dict):
        raise _wrong(key, "this is a table: NAME = VALUE")
    return {name(f"{key}.{k}", k): value(f"{key}.{k}", v) for k, v in table.items()}


def _list(entry: Reader, key: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(key, "this is not a list: put it into brackets")
    return tuple(entry(key, each) for each in value)


def _text(is_right: Callable[[str], object], wrong: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(key, "this is not text: put it into quotes")
    if not is_right(value):
        raise _wrong(key, f"{value!r} {wrong}")
    return value


def _pattern(key: str, value: Any, replacement: str = "") -> str:
    pattern = _WORDS(key, value)
    try:
        # The replacement is parsed even if nothing matches.
        re.compile(pattern).sub(replacement, "")
    except (re.error, IndexError, OverflowError, RecursionError) as error:
        text = f"{replacement or pattern!r} does not work: {error}"
        raise _wrong(key, text) from None
    return pattern


def _wrong(key: str, text: str) -> LaunchError:
    return LaunchError("HPC043", f"{key}: {text}. Correct it, {REMEDY}")


# Readers of texts, each with the problem of a wrong text.
_WORDS = partial(_text, bool, "is empty")
_NAME = partial(_text, _NAME_FORM.fullmatch, "is not a name: a-z, 0-9, -, _; not none")
_VARIABLE = partial(_text, _VARIABLE_FORM.fullmatch, "is not a variable: A-Z, 0-9, _")
_FILE = partial(_text, lambda v: v.startswith("/"), "is not a path: /path/to/file")
_KEY = partial(_text, lambda v: v.startswith(("/", "~/")), "is not a path: ~/FILE")
_VALUE = partial(_text, lambda v: v and v.isprintable(), "is empty or unprintable")
_GLOO_VALUE = partial(_text, _GLOO_FORM.fullmatch, "is not exact names, as in ib0,ib1")
_MODULE = partial(_text, is_module, "is not the name of a module")
_BINDING = partial(_text, BINDINGS.__contains__, f"is not one of {', '.join(BINDINGS)}")
_AUTH = partial(_text, AUTH.__contains__, f"is not one of {', '.join(AUTH)}")

# The keys of each table, with the readers of their values.
_SITE: Keys = {
    "title": _WORDS,
    "source": _WORDS,
    "recognise": partial(_list, _marker),
    "hosts": _rule,
    "variables": _variables,
    "profile": _profile,
    "preload": _modules,
    "bind": _BINDING,
    "auth": _AUTH,
    "key_file": _KEY,
}
_HOSTS: Keys = {
    "pattern": _pattern,
    "replacement": partial(_text, lambda _: True, ""),
    "examples": partial(_each, _WORDS, _WORDS),
}
_PROFILE: Keys = {"file": _FILE, "names": partial(_list, _named)}
_MARKER: Keys = {
    "variable": _VARIABLE,
    "values": partial(_list, _WORDS),
    "pattern": _pattern,
    "host": _pattern,
    "file": _FILE,
}
_MARKERS = ({"variable", "values"}, {"variable", "pattern"}, {"host"}, {"file"})
