"""The value of ``--rdzv-conf``, read and written as torch does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from torchrun_hpc.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torchrun_hpc.question import Value

# torch's RendezvousParameters.get_as_bool
TRUE = ("1", "true", "t", "yes", "y")
FALSE = ("0", "false", "f", "no", "n")

# torch's c10d_rendezvous_backend.create_backend
STORES = ("tcp", "file")


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
        if not part.strip():
            continue
        if not key or not value:
            raise LaunchError(
                f"{typed}: {part!r} is not of the form key=value. Type pairs with "
                "commas between them: join_timeout=900,read_timeout=600"
            )
        conf[key] = value
    for key, value in conf.items():
        if key == "is_host" and value.lower() not in TRUE + FALSE:
            raise LaunchError(f"{typed}: is_host={value} is neither true nor false")
        if key == "store_type" and value.lower() not in STORES:
            raise LaunchError(
                f"{typed}: store_type={value}: type one of {', '.join(STORES)}"
            )
        if key.endswith("timeout") and not re.fullmatch("[1-9][0-9]{0,8}", value):
            raise LaunchError(f"{typed}: {key}={value} is not a number of seconds")
    return conf


def uses_file(typed: Value | None) -> bool:
    """Say whether the store is a file, so that the endpoint is a path."""
    return parse(typed).get("store_type", "").lower() == "file"


def join(conf: Mapping[str, str]) -> str:
    """Write it again."""
    return ",".join(f"{key}={value}" for key, value in conf.items())
