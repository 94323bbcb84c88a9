"""Run the work of `pub`, `sub` and `fetch` until it ends or is interrupted."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine

import click

from headrace.cli import INTERRUPTED
from headrace.clients.errors import NotSupported


def run(work: Coroutine[None, None, int]) -> int:
    """Run `work`. The first interrupt cancels it; the second ends the process immediately."""

    async def interruptible() -> int:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)

        def interrupt() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            task.cancel()

        if threading.current_thread() is threading.main_thread():  # only this thread may handle signals
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            return await task
        except asyncio.CancelledError:
            return INTERRUPTED

    try:
        return asyncio.run(interruptible())
    except NotSupported as failure:
        raise click.UsageError(str(failure)) from None
