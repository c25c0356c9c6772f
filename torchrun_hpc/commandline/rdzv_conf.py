"""The value of ``--rdzv-conf``, read and written as torch does.

Whether a value can be used is a matter of the backend that reads it. What that one does
not read may be anything. What etcd, or somebody else's backend, reads is checked there.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torchrun_hpc.setting import Setting

# torch's RendezvousParameters.get_as_bool
TRUE = ("1", "true", "t", "yes", "y")
FALSE = ("0", "false", "f", "no", "n")

# What torch passes to RendezvousParameters beside the keys, and what sets it.
_TAKEN = {
    "self": "torch",
    "backend": "--rdzv-backend",
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}


# How a value is read: a ValueError or an OverflowError if it cannot be.
def _boolean(text: str) -> bool:
    return (*FALSE, *TRUE).index(text.lower()) >= len(FALSE)


def _store(text: str) -> int:
    return ("tcp", "file").index(text.lower())


def _positive(text: str) -> int:
    if int(text) <= 0:
        raise ValueError
    return int(text)


def _seconds(text: str) -> timedelta:
    return timedelta(seconds=_positive(text))


def _until(text: str) -> datetime:
    return datetime.now() + _seconds(text)  # noqa: DTZ005 - only whether there is one


def _since(text: str) -> datetime:
    return datetime.now() - _seconds(text)  # noqa: DTZ005 - as above


_Reader = tuple["Callable[[str], object]", str]

# The second is what to say of a value that cannot be read, behind it.
_SECONDS: _Reader = (_seconds, " is not a number of seconds")

# torch's dynamic_rendezvous.create_handler. The last two may be 0 there, or less, and
# the nodes never meet.
_DYNAMIC: dict[str, _Reader] = {
    "join_timeout": _SECONDS,
    "last_call_timeout": (_until, _SECONDS[1]),
    "close_timeout": _SECONDS,
    "heartbeat_timeout": _SECONDS,
    "keep_alive_interval": (_since, " is not a whole number above 0"),
    "keep_alive_max_attempt": (_since, " is not a whole number above 0"),
}
# torch's c10d_rendezvous_backend.create_backend
_FILE = {"store_type": (_store, ": type one of tcp, file"), **_DYNAMIC}
_C10D = {
    "is_host": (_boolean, " is neither true nor false"),
    "read_timeout": _SECONDS,
    **_FILE,
}
_READERS: dict[str, dict[str, _Reader]] = {
    "c10d": _C10D,
    "scheduler": _C10D,  # it stands in for that
    "static": {"timeout": _SECONDS},
}


def _readers(conf: Mapping[str, str], backend: str) -> Mapping[str, _Reader]:
    """Return how a backend reads the keys that it reads."""
    readers = _READERS.get(backend, {})
    return _FILE if readers is _C10D and _is_file(conf) else readers


def parse(setting: Setting | None) -> dict[str, str]:
    """Read ``key=value,key=value``.

    Raises:
        LaunchError: It has another form, or a key that is an option.
    """
    conf: dict[str, str] = {}
    for part in str(setting.value).split(",") if setting else ():
        key, _, value = (text.strip() for text in part.partition("="))
        if key and value:
            conf[key] = value
        elif part.strip():
            raise unusable(
                setting,
                f"{part!r} is not of the form key=value. Type pairs with commas "
                "between them: join_timeout=900,read_timeout=600",
            )
    for key in sorted(_TAKEN.keys() & conf.keys()):
        raise unusable(setting, f"{key} is set by {_TAKEN[key]}. Leave it out here")
    return conf


def check(setting: Setting | None, backend: str) -> None:
    """Check the values of those keys that a backend reads.

    Raises:
        LaunchError: It could not read one.
    """
    conf = parse(setting)
    readers = _readers(conf, backend)
    for key in sorted(readers.keys() & conf.keys()):
        read, fault = readers[key]
        try:
            read(conf[key])
        except (ValueError, OverflowError):
            raise unusable(setting, f"{key}={conf[key]}{fault}") from None


def unusable(
    setting: Setting | None, fault: str, *, everywhere: bool = True
) -> LaunchError:
    """Return the error for a value that cannot be used; see `LaunchError`."""
    return LaunchError("HPC019", f"{setting}: {fault}", everywhere=everywhere)


def seconds(setting: Setting | None, backend: str, key: str, default: int) -> int:
    """Return a number of seconds, or the default where a backend does not read the key.

    The option has been checked.
    """
    conf = parse(setting)
    return int(conf.get(key, default)) if key in _readers(conf, backend) else default


def uses_file(setting: Setting | None) -> bool:
    """Say whether the store of c10d is a file, so that the endpoint is a path."""
    return _is_file(parse(setting))


def _is_file(conf: Mapping[str, str]) -> bool:
    return conf.get("store_type", "").lower() == "file"


def filled(setting: Setting | None, **defaults: object) -> dict[str, str]:
    """Return the pairs of the option, and defaults for what is not among them."""
    conf = parse(setting)
    for key, value in defaults.items():
        conf.setdefault(key, str(value))
    return conf


def join(conf: Mapping[str, str]) -> str:
    """Write it again."""
    return ",".join(f"{key}={value}" for key, value in conf.items())
