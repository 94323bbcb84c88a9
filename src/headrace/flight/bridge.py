"""From a Flight thread to the broker's loop and back. Nothing of the broker is touched anywhere else than on its loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from headrace.errors import Unavailable

T = TypeVar("T")


class Bridge:
    """One hop each call. While the broker drains it refuses, and whoever waits is told so."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.is_closed = False

    def start(self, verb: Callable[[], Awaitable[T]]) -> concurrent.futures.Future[T]:
        """Begin on the loop; the future is the Flight thread's."""
        self._check()

        async def run() -> T:
            return await verb()

        return self._submit(run())

    def wait(self, verb: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """The answer of an asynchronous verb. Raises `Unavailable` after `seconds`."""
        return self.result(self.start(verb), seconds)

    def call(self, verb: Callable[[], T]) -> T:
        """The answer of a plain function that has to run on the loop."""
        self._check()

        async def run() -> T:
            return verb()

        return self.result(self._submit(run()), None)

    def result(self, future: concurrent.futures.Future[T], seconds: float | None) -> T:
        try:
            return future.result(seconds)
        except concurrent.futures.CancelledError:
            raise Unavailable("the broker is draining") from None
        except TimeoutError:
            future.cancel()
            raise Unavailable(f"no answer within {seconds} s") from None

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is gone
            work.close()
            raise Unavailable("the broker has stopped") from None

    def _check(self) -> None:
        if self.is_closed:
            raise Unavailable("the broker is draining")
