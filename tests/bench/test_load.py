"""The load generator against a peer in a thread: order, window, failures."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from headrace.bench.children import BenchFailed
from headrace.bench.load import MARK, Chunk, LoadConnection, chunk_records, run, sample_values
from headrace.bench.protocols.figg import FiggLoad
from headrace.wire.figg import encode
from headrace.wire.figg.decode import Decoder
from headrace.wire.figg.frames import PublishBatch, Role


class Peer:
    """Answers PUBLISH batches with one cumulative ACK per `every` records."""

    def __init__(self, sock: socket.socket, *, every: int = 1, records_max: int = 1 << 60) -> None:
        self.sock, self.every, self.records_max = sock, every, records_max
        self.values: list[bytes] = []
        self.unanswered_max = 0
        self._answered = 0

    def serve(self) -> None:
        decoder = Decoder(Role.SERVER)
        while data := self.sock.recv(4096):
            for message in decoder.feed(data):
                assert isinstance(message, PublishBatch)
                self.values += message.values
            self.unanswered_max = max(self.unanswered_max, len(self.values) - self._answered)
            if len(self.values) >= self.records_max:
                break
            if len(self.values) - self._answered >= self.every:
                self._answered = len(self.values)
                self.sock.sendall(encode.ack(self._answered - 1))
        self.sock.close()


@contextmanager
def peer(make: Callable[[socket.socket], Peer]) -> Iterator[tuple[socket.socket, Peer]]:
    ours, theirs = socket.socketpair()
    serving = make(theirs)
    thread = threading.Thread(target=serving.serve)
    thread.start()
    try:
        yield ours, serving
    finally:
        ours.close()
        thread.join(60)
        assert not thread.is_alive()


def chunks(values: list[bytes], size: int) -> list[Chunk]:
    load = FiggLoad()
    return [
        Chunk(load.publish("t", values[first : first + size], first), len(values[first : first + size]))
        for first in range(0, len(values), size)
    ]


def test_every_record_arrives_once_and_in_order() -> None:
    values = [b"%d" % index for index in range(5_000)]
    with peer(Peer) as (sock, serving):
        seconds = run([LoadConnection(sock, chunks(values, 700), FiggLoad().acks("t"), len(values))])
    assert serving.values == values
    assert seconds > 0


def test_a_window_is_never_exceeded_and_never_runs_dry() -> None:
    values = [b"%d" % index for index in range(2_000)]
    with peer(lambda sock: Peer(sock, every=75)) as (sock, serving):
        run([LoadConnection(sock, chunks(values, 25), FiggLoad().acks("t"), len(values) - 50, window=100)])
    assert serving.unanswered_max <= 100


def test_one_loop_serves_several_connections() -> None:
    values = [b"%d" % index for index in range(1_000)]
    with peer(Peer) as (one, first), peer(Peer) as (two, second):
        run(
            [
                LoadConnection(one, chunks(values, 100), FiggLoad().acks("t"), len(values)),
                LoadConnection(two, chunks(values, 300), FiggLoad().acks("t"), len(values)),
            ]
        )
    assert first.values == second.values == values


def test_a_lost_peer_ends_the_benchmark() -> None:
    values = [b"%d" % index for index in range(2_000)]
    with peer(lambda sock: Peer(sock, records_max=10)) as (sock, _):
        with pytest.raises((BenchFailed, ConnectionError)):
            run([LoadConnection(sock, chunks(values, 10), FiggLoad().acks("t"), len(values), window=10)])


def test_every_sample_value_has_its_size_and_exactly_one_mark() -> None:
    for size in (1, 2, 100):
        values = sample_values(size, 50)
        assert {len(value) for value in values} == {size}
        assert {value.count(MARK) for value in values} == {1}
    assert sample_values(100) == sample_values(100)


def test_large_sample_values_share_a_bounded_memory() -> None:
    values = sample_values(1024 * 1024, 1_000)
    assert len(values) == 1_000
    assert len({id(value) for value in values}) == 16


def test_a_chunk_is_at_most_a_quarter_of_the_window() -> None:
    assert chunk_records(128, 0) == 2048
    assert chunk_records(128, 400) == 100
    assert chunk_records(128, 1) == 1
    assert chunk_records(10_000_000, 0) == 1


def test_a_chunk_holds_whole_batches() -> None:
    assert chunk_records(128, 0, 500) == 2000
    assert chunk_records(10_000_000, 0, 500) == 500
    assert chunk_records(128, 1_000, 500) == 500


class Echo:
    """Meter that returns each read, up to a limit."""

    def __init__(self, wanted: int) -> None:
        self.count, self._wanted = 0, wanted

    def feed(self, received: bytearray, size: int) -> bytes:
        self.count += size
        return bytes(received[:size]) if self.count < self._wanted else b""


def echo(sock: socket.socket) -> None:
    with suppress(ConnectionError):
        while data := sock.recv(65536):
            sock.sendall(data)


def test_unsent_requests_do_not_block_reading() -> None:
    # Both directions fill up: a generator that sent synchronously would deadlock.
    ours, theirs = socket.socketpair()
    wanted = 20_000_000
    thread = threading.Thread(target=echo, args=(theirs,))
    thread.start()
    try:
        run([LoadConnection(ours, [Chunk(bytes(2_000_000), 0)], Echo(wanted), wanted)])
    finally:
        ours.close()
        thread.join(60)
        theirs.close()
    assert not thread.is_alive()
