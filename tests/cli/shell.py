"""The command line in this process, and a broker in memory on a thread of its own for a whole module."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest

from headrace.broker.broker import Broker
from headrace.cli import main
from tests.clients.flymq.support import Server, serving
from tests.sessions.flymq.support import DEV

WAIT_SECONDS = 300
T = TypeVar("T")


@dataclass
class Ended:
    code: int
    out: bytes
    err: str

    @property
    def rows(self) -> list[Any]:
        """The lines of stdout as JSON."""
        assert self.code == 0, self.err
        return [json.loads(line) for line in self.out.splitlines()]


def headrace(*arguments: str, given: bytes = b"", **environment: str) -> Ended:
    """Run one command line."""
    out, err = io.TextIOWrapper(io.BytesIO(), write_through=True), io.StringIO()
    hook, stdin, before = sys.excepthook, sys.stdin, dict(os.environ)
    os.environ.update(environment)
    with tempfile.TemporaryFile() as file:
        file.write(given)
        file.seek(0)
        sys.stdin = io.TextIOWrapper(file)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
                main(arguments)
        finally:
            for thread in threading.enumerate():
                if thread.name == "input":
                    thread.join(WAIT_SECONDS)  # it reads the file
            sys.excepthook, sys.stdin = hook, stdin
            os.environ.clear()
            os.environ.update(before)
    assert isinstance(left.value.code, int)
    return Ended(left.value.code, out.buffer.getvalue(), err.getvalue())


class Shell:
    """Commands against one broker."""

    def __init__(self, server: Server, loop: asyncio.AbstractEventLoop) -> None:
        self.server, self._loop = server, loop

    @property
    def broker(self) -> Broker:
        return self.server.home.broker

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"

    def __call__(self, *arguments: str, given: bytes = b"", **environment: str) -> Ended:
        return headrace(*arguments, given=given, **{"HEADRACE_SERVER": self.address, **environment})

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the broker's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)

    def create(self, topic: str, partitions: int = 1) -> None:
        self.do(self.broker.create_topic(DEV, topic, partitions=partitions))

    def at(self, time_ms: int) -> None:
        """Set the broker's clock."""
        self.server.home.now = time_ms


@contextlib.contextmanager
def shell_of_a_broker() -> Iterator[Shell]:
    started, ended = threading.Event(), threading.Event()
    found: list[Shell] = []
    stop: list[asyncio.Event] = []

    async def serve() -> None:
        async with serving() as server:
            stop.append(asyncio.Event())
            found.append(Shell(server, asyncio.get_running_loop()))
            started.set()
            await stop[0].wait()
        ended.set()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="broker", daemon=True)
    thread.start()
    assert started.wait(WAIT_SECONDS), "the broker did not start"
    try:
        yield found[0]
    finally:
        found[0]._loop.call_soon_threadsafe(stop[0].set)
        thread.join(WAIT_SECONDS)
        assert ended.is_set(), "the broker did not stop"
