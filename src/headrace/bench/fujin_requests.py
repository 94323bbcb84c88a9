"""Closed loop over QUIC: one connection, one request under way on each of its streams.

The load generator uses the broker's QUIC library, as does the bare server it is compared with.
"""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from headrace.bench import fujin
from headrace.bench.bare import Kind, head
from headrace.bench.children import Address, BenchFailed
from headrace.bench.closed_loop import Exchanged, Framing, ReplyFrames, fixed, measured_cpu
from headrace.bench.exchanges import Exchange, fetch_records
from headrace.bench.load import sample_values
from headrace.net.quic.endpoint import ClientEndpoint
from headrace.wire.fujin import ReaderKind, WriteForm, encode

_FETCHED: Final = struct.Struct(">B4sBI")
assert len(encode.fetched(bytes(4), None, [])) == _FETCHED.size
_WRITTEN: Final = struct.Struct(">B4sB")
assert len(encode.written([bytes(4)])) == _WRITTEN.size
REQUESTS_MIN: Final = 4
"""Requests that the records of one stream suffice for."""


class StreamRequester:
    """One stream with at most one request under way."""

    __slots__ = ("_requests", "frames", "request_bytes", "send", "sent_at")

    def __init__(self, send: Callable[[bytes], None], requests: Iterator[bytes], framing: Framing) -> None:
        self.send, self._requests, self.frames = send, requests, ReplyFrames(framing)
        self.sent_at = 0.0
        self.request_bytes = 0

    def send_next(self) -> bool:
        """Send the next request. Return False if there is none."""
        request = next(self._requests, None)
        if request is None:
            return False
        self.request_bytes = len(request)
        self.sent_at = time.perf_counter()
        self.send(request)
        return True


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """Streams to open: the first bytes of each, the size of the answer to them, and the requests."""

    starts: Sequence[bytes]
    start_reply_bytes: int
    exchange: Exchange


class Streams(fujin.Connection):
    """A connection whose streams exchange requests and replies."""

    def __init__(self, endpoint: ClientEndpoint) -> None:
        super().__init__(endpoint)
        self.requesters: dict[int, StreamRequester] = {}
        self.on_reply: Callable[[StreamRequester], None] = lambda _requester: None

    def received(self, stream: int, data: bytes, finished: bool) -> None:
        requester = self.requesters.get(stream)
        if requester is None:
            super().received(stream, data, finished)
            return
        self.carrier.taken(stream, len(data))
        try:
            if requester.frames.feed(data, len(data)):
                self.on_reply(requester)
        except BenchFailed as failure:
            self.lost(str(failure))

    async def open_streams(self, plan: StreamPlan) -> None:
        """Open the streams and wait until they are connected."""
        streams = {}
        for start, requests in zip(plan.starts, plan.exchange.requests, strict=True):
            stream = self.carrier.open_stream()
            self.carrier.send(stream, start)
            streams[stream] = requests
        await self.until(lambda: all(self.counts.get(stream, 0) >= plan.start_reply_bytes for stream in streams))
        for stream, requests in streams.items():
            self.requesters[stream] = StreamRequester(partial(self.carrier.send, stream), requests, plan.exchange.framing)

    async def exchange(self, seconds: float, peer_cpu: Callable[[], float]) -> Exchanged:
        """Send requests on all streams for `seconds`, as `closed_loop.exchange` does."""
        result, clock = Exchanged(), time.perf_counter
        waiting, replies_min = 0, len(self.requesters) if seconds else 0

        def on_reply(requester: StreamRequester) -> None:
            nonlocal waiting
            now = clock()
            if not result.seconds:
                result.latencies.append(now - requester.sent_at)
                if (now < end or len(result.latencies) < replies_min) and requester.send_next():
                    return
                result.seconds = now - began
            else:
                result.uncounted += 1
            waiting -= 1
            self.changed.set()

        self.on_reply = on_reply
        with measured_cpu(result, peer_cpu):
            began = clock()
            end = began + seconds
            waiting = sum(requester.send_next() for requester in self.requesters.values())
            await self.until(lambda: waiting == 0)
        return result


def run(address: Address, plan: StreamPlan, seconds: float, peer_cpu: Callable[[], float]) -> tuple[Exchanged, int, int]:
    """Return the replies, and the bytes of one request and of one reply."""

    async def work() -> tuple[Exchanged, int, int]:
        connection = await Streams.open(address)
        try:
            assert isinstance(connection, Streams)
            await connection.open_streams(plan)
            await connection.exchange(0.0, peer_cpu)
            any_stream = next(iter(connection.requesters.values()))
            sizes = any_stream.request_bytes, any_stream.frames.reply_bytes
            return await connection.exchange(seconds, peer_cpu), *sizes
        finally:
            connection.close()

    return fujin.on_loop(work())


def prepare(address: Address, operation: str, streams: int, records: int, value_bytes: int) -> StreamPlan:
    """Return the streams of an operation. A FETCH consumes, so each stream has its own topic."""
    if operation == "publish":
        topic, cid = fujin.new_topic(), bytes(4)
        frames = [encode.writes(topic, [cid], [value], form=WriteForm.NEVER) for value in sample_values(value_bytes, 100)]
        written = Exchange([itertools.cycle(frames) for _ in range(streams)], Framing(_WRITTEN.size, _written_bytes))
        return StreamPlan([encode.connect_writer()] * streams, 0, written)
    count = fetch_records(operation)
    each = max(records // streams, REQUESTS_MIN * count)
    topics = fujin.filled_topics(address, fujin.QuicTraffic(each * streams, value_bytes, 1, streams))

    def fetched_bytes(reply: bytes) -> int:
        _kind, _cid, error, got = _FETCHED.unpack(reply)
        if error or not got:
            raise BenchFailed(f"fujin: FETCH failed or found no record: {reply.hex()}")
        return _FETCHED.size + int(got) * (4 + value_bytes)

    requests = [itertools.repeat(encode.fetch(bytes(4), count), each // count) for _ in topics]
    starts = [encode.connect_reader(ReaderKind.PULL, True, topic) for topic in topics]
    return StreamPlan(starts, len(encode.reader_connected()), Exchange(requests, Framing(_FETCHED.size, fetched_bytes)))


def prepare_bare(operation: str, streams: int, request_bytes: int, reply_bytes: int) -> StreamPlan:
    """Return streams to the bare server with the same bytes."""
    kind = Kind.COMMIT if operation == "publish" else Kind.ECHO
    requests = [itertools.repeat(bytes(request_bytes)) for _ in range(streams)]
    return StreamPlan([head(kind, request_bytes, reply_bytes)] * streams, 0, Exchange(requests, fixed(reply_bytes)))


def _written_bytes(reply: bytes) -> int:
    if _WRITTEN.unpack(reply)[2]:
        raise BenchFailed("fujin: the broker answered a WRITE with an error")
    return _WRITTEN.size
