"""Torch's log lines on a failure that the launcher reports itself."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_PACKAGE = "torch.distributed.elastic"
_LOGGERS = "agent.server.api multiprocessing.api multiprocessing.errors.error_handler"
_WITHHELD = (
    "Received %s death signal",
    "Sending process ",
    "failed (exitcode: ",
    "no error file defined for parent",
)


@contextlib.contextmanager
def withheld(*, is_quiet: bool) -> Iterator[None]:
    """Withhold torch's log lines on signals, and on failed or stopped workers."""
    names = _LOGGERS.split() if is_quiet else ()
    loggers = [logging.getLogger(f"{_PACKAGE}.{name}") for name in names]
    for logger in loggers:
        logger.addFilter(_is_shown)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_WITHHELD)
