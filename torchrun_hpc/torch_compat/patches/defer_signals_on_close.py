"""A second SIGTERM does not interrupt what the first one began.

Torch's handler raises an exception even while the workers write their checkpoints. Then
they are signalled again, and after one more signal the agent ends without them.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import Any

from torch.distributed.elastic.multiprocessing import api

from torchrun_hpc.torch_compat import capabilities
from torchrun_hpc.torch_compat.patches.replacing import has, takes, wrap

TARGET = "PContext.close"
REASON = "an agent signalled twice can leave workers behind (since pytorch#61602)"
IS_FOR = capabilities.EVERY

_torch: Any = api
_NAME = "close"
_HANDLER = "_terminate_process_handler"


def fits() -> bool:
    """Check that workers are ended here, and that torch's handler raises."""
    return (
        takes(_torch.PContext, _NAME, "self", "death_sig", "timeout")
        and has(_torch, _HANDLER, "SignalException")
        and capabilities.uses(_torch.PContext.start, _HANDLER)
    )


def apply(*_: object) -> None:
    """Let torch's handler wait until the workers have ended."""
    wrap(_torch.PContext, _NAME, _close)


def _close(original: Any, context: Any, *args: Any, **options: Any) -> Any:
    if threading.current_thread() is not threading.main_thread():
        return original(context, *args, **options)
    handler = getattr(_torch, _HANDLER)
    repeated = isinstance(sys.exc_info()[1], _torch.SignalException)
    noted: list[int] = []
    held = [n for n in signal.valid_signals() if signal.getsignal(n) is handler]
    for number in held:
        signal.signal(number, lambda number, _frame: noted.append(number))
    try:
        closed = original(context, *args, **options)
    finally:
        for number in held:
            signal.signal(number, handler)
    # During a restart it is the first signal, so the agent must end.
    if noted and not repeated:
        signal.raise_signal(noted[0])
    return closed
