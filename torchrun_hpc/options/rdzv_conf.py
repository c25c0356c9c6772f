"""The value of ``--rdzv-conf``, read and written like torch does.

Only the keys that the chosen backend reads are checked, and only if torch has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrun_hpc import limits
from torchrun_hpc.errors import LaunchError
from torchrun_hpc.options.values import C10D, STATIC

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.errors import Setting

# torch's RendezvousParameters.get_as_bool
BOOLEANS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n"), False),
}

# Other parameters of RendezvousParameters, and the option for each.
_TAKEN = {
    "self": "torch",
    "backend": "--rdzv-backend",
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}

_MOST_SECONDS = 10**10  # torch adds them to the date

# torch's dynamic_rendezvous.create_handler and c10d_rendezvous_backend.create_backend.
# Torch accepts 0 keep-alives, but then the nodes never meet.
_OF_FILE = (  # also read if c10d's store is a file
    *("join_timeout", "last_call_timeout", "close_timeout", "heartbeat_timeout"),
    *("keep_alive_interval", "keep_alive_max_attempt", "store_type"),
)
_READ_BY = {C10D: (*_OF_FILE, "is_host", "read_timeout"), STATIC: ("timeout",)}
_FIELDS = ("is_host", "join_timeout", "keep_alive_interval", "keep_alive_max_attempt")


@dataclass(frozen=True)
class RdzvConf:
    """The pairs of ``--rdzv-conf``; the value of a missing key is ``None``."""

    pairs: Mapping[str, str] = field(default_factory=dict)
    uses_file: bool = False  # c10d's store is a file: the endpoint is a path
    is_host: bool | None = None  # whether this node hosts c10d's store
    join_timeout: int | None = None  # seconds for the nodes to join
    keep_alive_interval: int | None = None  # seconds between signs of life
    keep_alive_max_attempt: int | None = None  # missing signs that mean a lost node

    @property
    def silence_timeout(self) -> int:
        """Seconds that an agent may be silent, if the nodes meet by our rendezvous.

        If only one of the two keys is set, the other has PyTorch's default. Then the
        time is never shorter than ours.
        """
        interval, attempts = self.keep_alive_interval, self.keep_alive_max_attempt
        least = limits.LEAST_SILENCE if interval and attempts else limits.SILENCE_LIMIT
        return max((interval or 5) * (attempts or 3), least)

    def filled(self, **defaults: object) -> str:
        """Write the option's value again, with defaults for missing keys."""
        missing = {k: v for k, v in defaults.items() if k not in self.pairs}
        pairs = {**self.pairs, **missing}
        return ",".join(f"{key}={value}" for key, value in pairs.items())


def read(setting: Setting, backend: str) -> RdzvConf:
    """Read ``key=value,key=value``; refuse what the backend could not read."""
    pairs = _pairs(setting)
    uses_file = backend == C10D and pairs.get("store_type", "").lower() == "file"
    keys = _OF_FILE if uses_file else _READ_BY.get(backend, ())
    values = {k: _value(setting, k, pairs[k]) for k in sorted({*keys} & pairs.keys())}
    fields = {key: value for key, value in values.items() if key in _FIELDS}
    return RdzvConf(pairs, uses_file, **fields)


def _pairs(setting: Setting) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in str(setting.value).split(","):
        key, _, value = (text.strip() for text in part.partition("="))
        if key and value:
            pairs[key] = value
        elif part.strip():
            raise unusable(
                setting,
                f"{part!r} is not key=value. Use pairs with commas, such as "
                "join_timeout=900,read_timeout=600",
            )
    for key in sorted(_TAKEN.keys() & pairs.keys()):
        raise unusable(setting, f"{key} is set by {_TAKEN[key]}. Remove it here")
    return pairs


def _value(setting: Setting, key: str, text: str) -> Any:
    if key == "is_host":
        if text.lower() in BOOLEANS:
            return BOOLEANS[text.lower()]
        raise unusable(setting, f"{key}={text} is neither true nor false")
    if key == "store_type":
        if text.lower() in {"tcp", "file"}:
            return text.lower()
        raise unusable(setting, f"{key}={text}: use tcp or file")
    try:
        seconds = int(text)
    except ValueError:
        seconds = 0
    if 0 < seconds < _MOST_SECONDS:
        return seconds
    kind = "a whole number above 0" if "keep" in key else "a number of seconds"
    raise unusable(setting, f"{key}={text} is not {kind}")


def unusable(setting: Setting, fault: str, *, everywhere: bool = True) -> LaunchError:
    """Return the refusal of the option; `LaunchError` explains ``everywhere``."""
    return LaunchError("HPC019", f"{setting}: {fault}", everywhere=everywhere)
