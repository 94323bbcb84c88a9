"""Raw clients of the other protocols: blocking sockets and structs, written from the specifications.

A client sends values with its own numbers and returns the highest acknowledged one. An acknowledgement is a reply for each value
(FlyMQ), one for a batch (RustLog), or a PONG after them (BlipMQ).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Final, TypeVar

import headrace
from headrace.clients.api import Client
from headrace.clients.messages import ConnectionState
from headrace.errors import HeadraceError
from tests.canaries import secret
from tests.crash.peer import Numbered, Peer

_Answer = TypeVar("_Answer")
BLIPMQ_KEY: Final = secret("api-key")

_U16, _U32, _U64 = struct.Struct(">H"), struct.Struct(">I"), struct.Struct(">Q")


class _Framed(Peer):
    """Base class for protocols with their own frame header and ordered acknowledgements."""

    def __init__(self, address: tuple[str, int], *, timeout: float = 10.0) -> None:
        super().__init__(address, timeout=timeout)
        self._waiting: deque[int] = deque()
        """Numbers of pending acknowledgements, in order."""

    def acknowledged(self) -> int:
        highest = -1
        while highest < 0:
            for _ in self._acknowledgements():
                highest = self._waiting.popleft()
        return highest

    def _acknowledgements(self) -> Iterator[None]:
        """Yield received acknowledgements, after waiting for some bytes. Raises `ConnectionError` on an error reply."""
        raise NotImplementedError

    def _take(self, header: int, size: Callable[[bytearray], int]) -> Iterator[bytes]:
        """Yield complete frames; `size` returns the length of one from its header."""
        while len(self._received) < header or len(self._received) < size(self._received):
            self._more()
        while len(self._received) >= header and len(self._received) >= (whole := size(self._received)):
            frame = bytes(self._received[:whole])
            del self._received[:whole]
            yield frame


class FlyMqPeer(_Framed):
    """Sends PRODUCE, with a reply for each."""

    NAME = "flymq"

    def publish(self, values: Sequence[Numbered]) -> None:
        frames = []
        for topic, number, value in values:
            name = topic.encode()
            payload = _U16.pack(len(name)) + name + _U32.pack(0) + _U32.pack(len(value)) + value + b"\xff\xff\xff\xff"
            frames.append(b"\xaf\x01\x01\x01" + _U32.pack(len(payload)) + payload)
            self._waiting.append(number)
        self.send(b"".join(frames))

    def _acknowledgements(self) -> Iterator[None]:
        for frame in self._take(8, lambda received: 8 + _U32.unpack_from(received, 4)[0]):
            if frame[2] == 0xFF:
                raise ConnectionError(f"FlyMQ refused: {frame[8:]!r}")
            yield


class RustLogPeer(_Framed):
    """Sends Produce in the binary dialect: one request and one reply for adjacent values of one topic."""

    NAME = "rustlog"

    def publish(self, values: Sequence[Numbered]) -> None:
        frames = []
        start = 0
        for end in range(1, len(values) + 1):
            if end == len(values) or values[end][0] != values[start][0]:
                name = values[start][0].encode()
                records = b"".join(_U32.pack(len(value)) + value for _, _, value in values[start:end])
                payload = b"\x01" + _U16.pack(len(name)) + name + _U32.pack(0) + _U32.pack(end - start) + records
                frames.append(_U32.pack(len(payload)) + payload)
                self._waiting.append(values[end - 1][1])
                start = end
        self.send(b"".join(frames))

    def _acknowledgements(self) -> Iterator[None]:
        for frame in self._take(4, lambda received: 4 + _U32.unpack_from(received)[0]):
            if frame[4] != 1:
                raise ConnectionError(f"RustLog refused: {frame[5:]!r}")
            yield


class BlipMqPeer(_Framed):
    """Sends PUBLISH with QoS 1 and a PING after them; the PONG confirms that they are durable."""

    NAME = "blipmq"

    def __init__(self, address: tuple[str, int], *, timeout: float = 10.0) -> None:
        super().__init__(address, timeout=timeout)
        key = BLIPMQ_KEY.encode()
        self.send(self._frame(1, _U16.pack(1)) + self._frame(2, _U16.pack(len(key)) + key))
        answers: list[bytes] = []
        while len(answers) < 2:
            answers += self._frames()
        if any(answer[4] != 5 for answer in answers):
            raise ConnectionError(f"BlipMQ refused: {answers!r}")

    @staticmethod
    def _frame(kind: int, payload: bytes) -> bytes:
        return _U32.pack(9 + len(payload)) + bytes([kind]) + _U64.pack(kind) + payload

    def _frames(self) -> Iterator[bytes]:
        return self._take(4, lambda received: 4 + _U32.unpack_from(received)[0])

    def publish(self, values: Sequence[Numbered]) -> None:
        frames = []
        for topic, _, value in values:
            name = topic.encode()
            frames.append(self._frame(3, b"\x01" + _U16.pack(len(name)) + name + value))
        if values:
            self._waiting.append(values[-1][1])
            frames.append(self._frame(7, b""))
        self.send(b"".join(frames))

    def _acknowledgements(self) -> Iterator[None]:
        for frame in self._frames():
            if frame[4] != 8:
                raise ConnectionError(f"BlipMQ refused: {frame[13:]!r}")
            yield


class FujinPeer(Peer):
    """Writes over QUIC with our own client, because a raw QUIC client is too much code. It is discarded with its first connection."""

    NAME = "fujin"
    IS_QUIC = True

    def __init__(self, address: tuple[str, int], *, timeout: float = 10.0) -> None:
        self._loop = asyncio.new_event_loop()
        self._lost = asyncio.Event()
        self._acknowledged = -1
        self._timeout = timeout
        self._client = self._wait(self._connect(f"fujin://{address[0]}:{address[1]}"))

    async def _connect(self, url: str) -> Client:
        def changed(state: ConnectionState, reason: str) -> None:
            if state is ConnectionState.DISCONNECTED:
                self._lost.set()

        return await headrace.connect(url, on_state=changed)

    def _wait(self, work: Coroutine[Any, Any, _Answer]) -> _Answer:
        """Return the reply, unless the connection is lost first."""

        async def first() -> _Answer:
            answer, lost = asyncio.ensure_future(work), asyncio.ensure_future(self._lost.wait())
            await asyncio.wait({answer, lost}, timeout=self._timeout, return_when=asyncio.FIRST_COMPLETED)
            lost.cancel()
            if not answer.done():
                answer.cancel()
                raise ConnectionError("the broker is gone")
            return answer.result()

        try:
            return self._loop.run_until_complete(first())
        except HeadraceError as failure:
            raise ConnectionError(str(failure)) from failure

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._client.abandon()  # the broker is gone
        with contextlib.suppress(HeadraceError, OSError):
            self._loop.run_until_complete(asyncio.wait_for(self._client.close(), 2))
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, HeadraceError, OSError):
                self._loop.run_until_complete(task)
        self._loop.close()

    def publish(self, values: Sequence[Numbered]) -> None:
        if values:
            self._wait(self._publish(values))
            self._acknowledged = values[-1][1]

    async def _publish(self, values: Sequence[Numbered]) -> None:
        """Send all values before waiting for the first reply, because the broker may be killed at any moment."""
        answers = []
        for topic, batch in itertools.groupby(values, key=lambda numbered: numbered[0]):
            answers.append(await self._client.send_many(topic, [value for _, _, value in batch]))
        await asyncio.gather(*answers)

    def acknowledged(self) -> int:
        return self._acknowledged


PEERS: Final[tuple[type[Peer], ...]] = (Peer, FlyMqPeer, BlipMqPeer, RustLogPeer, FujinPeer)
