from __future__ import annotations

import asyncio
import gc

import pytest

from torchrun_hpc.rendezvous.loop import within


async def _answer():
    return 5


async def _fail():
    raise ConnectionResetError


async def _hang():
    await asyncio.Event().wait()


async def _fail_late():
    """Fail while it is cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        raise ConnectionResetError


@pytest.mark.parametrize(
    ("seconds", "doing", "error"),
    [
        (60, _fail, ConnectionResetError),
        (0, _hang, asyncio.TimeoutError),
        (0, _fail_late, asyncio.TimeoutError),
    ],
)
def test_a_wait_raises_what_ended_it(seconds, doing, error):
    faults = []

    async def main():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _loop, fault: faults.append(fault))
        with pytest.raises(error):
            await within(seconds, doing())
        await asyncio.sleep(0)  # the cancelled task ends
        gc.collect(0)

    asyncio.run(main())
    assert not faults


def test_a_wait_returns_the_result():
    assert asyncio.run(within(60, _answer())) == 5


def test_a_cancelled_wait_ends_the_task():
    ended = []

    async def doing():
        try:
            await _hang()
        finally:
            ended.append(True)

    async def main():
        waiting = asyncio.create_task(within(60, doing()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)
        assert ended

    asyncio.run(main())
