"""QUIC server without a broker, the ceiling of the library: `python -m benchmarks.quic_server DIRECTORY`.

Prints its address as JSON and serves until it is stopped. A stream begins with a u64, the number of bytes that follow; when all have
arrived, the server sends one byte. On a stream that begins with 0 and a second u64, the server sends that many bytes.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import struct
import sys
from pathlib import Path

import uvloop

from headrace.limits import OUTPUT_HIGH_WATER_BYTES
from headrace.net.quic.listener import QuicLimits, QuicListener, QuicProtocol
from headrace.server.quic import self_signed
from headrace.sessions.contract import Link
from headrace.wire.fujin import ALPN, encode

COUNT = struct.Struct(">Q")
_CHUNK = bytes(128 * 1024)


class RawSession:
    """Reads all that arrives, or sends the requested number of bytes."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._head = b""
        self._left = 0
        self._to_send = 0

    def receive(self, data: bytes) -> None:
        if len(self._head) < COUNT.size:
            self._head += data
            if len(self._head) < COUNT.size:
                return
            (self._left,) = COUNT.unpack_from(self._head)
            data = self._head[COUNT.size :]
            if self._left == 0:
                (self._to_send,) = COUNT.unpack(data)
                self.drained()
                return
        self._left -= len(data)
        if self._left == 0:
            self._link.send(b"\x00")

    def drained(self) -> None:
        while self._to_send and self._link.unsent_bytes <= OUTPUT_HIGH_WATER_BYTES:
            chunk = _CHUNK[: self._to_send]
            self._to_send -= len(chunk)
            self._link.send(chunk)

    def finished(self) -> None:
        self._link.close("finished", error=False)

    def closing(self) -> None:
        self._link.close("draining", error=False)

    def lost(self) -> None: ...


async def serve(directory: Path) -> None:
    tls = self_signed(directory, now=datetime.datetime.now(datetime.UTC))
    listener = await QuicListener.open("127.0.0.1", 0, QuicProtocol("raw", ALPN, RawSession, encode.PING), tls, QuicLimits())
    print(json.dumps({"address": listener.address}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(Path(sys.argv[1])))
