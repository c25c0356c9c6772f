"""The value of ``--rdzv-conf``, read and written as torch does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.inputs import Value

# torch's RendezvousParameters.get_as_bool
TRUE = ("1", "true", "t", "yes", "y")
FALSE = ("0", "false", "f", "no", "n")

# torch's c10d_rendezvous_backend.create_backend
STORES = ("tcp", "file")

# torch's dynamic_rendezvous.create_handler
NUMBERS = ("keep_alive_interval", "keep_alive_max_attempt")


def parse(typed: Value | None) -> dict[str, str]:
    """Read ``key=value,key=value``.

    Raises:
        LaunchError: It has another form, or a value that torch cannot use.
    """
    conf: dict[str, str] = {}
    if typed is None:
        return conf
    for part in str(typed.value).split(","):
        key, _, value = (text.strip() for text in part.partition("="))
        if part.strip():
            conf[key] = value
            _check(typed, part, key, value)
    return conf


def _check(typed: Value, part: str, key: str, value: str) -> None:
    if not key or not value:
        fault = (
            f"{part!r} is not of the form key=value. Type pairs with commas between "
            "them: join_timeout=900,read_timeout=600"
        )
    elif key == "is_host" and value.lower() not in TRUE + FALSE:
        fault = f"is_host={value} is neither true nor false"
    elif key == "store_type" and value.lower() not in STORES:
        fault = f"store_type={value}: type one of {', '.join(STORES)}"
    elif key.endswith("timeout") and not re.fullmatch("[1-9][0-9]{0,8}", value):
        fault = f"{key}={value} is not a number of seconds"
    elif key in NUMBERS and not re.fullmatch("[1-9][0-9]{0,8}", value):
        fault = f"{key}={value} is not a whole number above 0"
    else:
        return
    raise LaunchError("HPC019", f"{typed}: {fault}", everywhere=True)


def uses_file(typed: Value | None) -> bool:
    """Say whether the store is a file, so that the endpoint is a path."""
    return parse(typed).get("store_type", "").lower() == "file"


def filled(typed: Value | None, **defaults: object) -> dict[str, str]:
    """Return what was typed, and the defaults of what was not."""
    conf = parse(typed)
    for key, value in defaults.items():
        conf.setdefault(key, str(value))
    return conf


def join(conf: Mapping[str, str]) -> str:
    """Write it again."""
    return ",".join(f"{key}={value}" for key, value in conf.items())
