"""Calls from Flight threads to the broker's event loop. The broker is used only on its loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from headrace.broker.broker import Broker
from headrace.errors import Unavailable

T = TypeVar("T")


class Bridge:
    """Executes functions on the event loop and waits for them. While the broker drains, calls fail with `Unavailable`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.is_closed = False

    def start(self, function: Callable[[], Awaitable[T]]) -> concurrent.futures.Future[T]:
        """Start an asynchronous function on the loop and return its future for the Flight thread."""
        self._check()

        async def run() -> T:
            return await function()

        return self._submit(run())

    def wait(self, function: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """Return the result of an asynchronous function. Raises `Unavailable` after `seconds`."""
        return self.result(self.start(function), seconds)

    def call(self, function: Callable[[], T]) -> T:
        """Return the result of a plain function that must run on the loop."""
        self._check()

        async def run() -> T:
            return function()

        return self.result(self._submit(run()), None)

    def find(self, broker: Broker, function: Callable[[], T]) -> T:
        """Return the result of a plain function that needs a topic, which another broker may have just created."""

        async def run() -> T:
            return function()

        return self.wait(lambda: broker.with_new_topics(run))

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
        except RuntimeError:  # the loop is closed
            work.close()
            raise Unavailable("the broker has stopped") from None

    def _check(self) -> None:
        if self.is_closed:
            raise Unavailable("the broker is draining")
