"""What torch's agent logs of a failure, of which the launcher has a report."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOGGER = "torch.distributed.elastic.multiprocessing.api"
_WITHHELD = ("Sending process ", "failed (exitcode: ")


@contextlib.contextmanager
def withheld() -> Iterator[None]:
    """Withhold its lines about workers that it stops, and about the one that failed."""
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_is_shown)
    try:
        yield
    finally:
        logger.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_WITHHELD)
