"""A TCP proxy with faults: it resets connections, delays, holds back, and delivers byte by byte."""

from __future__ import annotations

import asyncio
from types import TracebackType

Pump = asyncio.Task[None]


class FaultProxy:
    """A proxy between a client and `host:port`. Faults are attributes that may change while it runs.

    async with FaultProxy(listener.host, listener.port) as proxy:
        client = await connect(proxy.host, proxy.port)
        proxy.cut()
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.host, self.port = "127.0.0.1", 0
        self.refusing = False
        """Close new connections at once."""
        self.delay_seconds = 0.0
        """Before each chunk is passed on."""
        self.chunk_bytes = 65_536
        """1: byte by byte."""
        self.holding_answers = False
        """Pass nothing on to the client until it is released."""
        self.cut_after_answer_bytes: int | None = None
        """Cut everything once so many more bytes went to the client; the rest of the chunk is lost."""
        self.connections = 0
        self.request_bytes = self.answer_bytes = 0
        self._released = asyncio.Event()
        self._pumps: set[Pump] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._accept, self.host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self._server.close()
        self.cut()
        for pump in list(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection, on both sides."""
        for writer in list(self._writers):
            writer.transport.abort()

    def hold_answers(self) -> None:
        self.holding_answers = True
        self._released.clear()

    def release_answers(self) -> None:
        self.holding_answers = False
        self._released.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refusing:
            writer.transport.abort()
            return
        try:
            far_reader, far_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, far_writer}
        for task in (self._pump(reader, far_writer, answers=False), self._pump(far_reader, writer, answers=True)):
            pump = asyncio.get_running_loop().create_task(task)
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        try:
            while chunk := await reader.read(self.chunk_bytes):
                if self.delay_seconds:
                    await asyncio.sleep(self.delay_seconds)
                while answers and self.holding_answers:
                    await self._released.wait()
                chunk = self._counted(chunk, answers)
                writer.write(chunk)
                await writer.drain()
                if self.cut_after_answer_bytes == 0:
                    self.cut_after_answer_bytes = None
                    self.cut()
            writer.write_eof()
        except OSError:
            writer.transport.abort()
        finally:
            self._writers.discard(writer)

    def _counted(self, chunk: bytes, answers: bool) -> bytes:
        if not answers:
            self.request_bytes += len(chunk)
            return chunk
        if self.cut_after_answer_bytes is not None:
            chunk = chunk[: self.cut_after_answer_bytes]
            self.cut_after_answer_bytes -= len(chunk)
        self.answer_bytes += len(chunk)
        return chunk
