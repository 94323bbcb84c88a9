"""Closed loops, the bare servers, and the figures of `bench requests`."""

from __future__ import annotations

import itertools
import socket
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.bench.bare import Bare, Kind, bare_server, head
from headrace.bench.children import BenchFailed
from headrace.bench.closed_loop import Exchanged, Framing, ReplyFrames, Requester, exchange, fixed
from headrace.bench.exchanges import PUBLISHED, operations_of
from headrace.bench.load import connected
from headrace.bench.protocols.contract import receive_exactly
from headrace.bench.report import Target
from headrace.bench.requests import Point
from headrace.wire.blipmq import encoder as blipmq
from headrace.wire.figg import encode as figg
from headrace.wire.flymq import Dialect as FlyMqDialect
from headrace.wire.flymq import encode_failure
from headrace.wire.flymq.messages import Failure
from headrace.wire.rustlog import Dialect, encode_reply
from headrace.wire.rustlog import errors as rustlog_errors

LENGTH_PREFIXED = Framing(2, lambda start: 2 + int.from_bytes(start, "big"))
REPLY = b"\x00\x05abcde"


def no_cpu() -> float:
    return 0.0


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    with bare_server(tmp_path_factory.mktemp("bare")) as running:
        yield running


@pytest.mark.parametrize("cut", range(len(REPLY) + 1))
def test_a_reply_cut_anywhere_is_complete_with_its_last_byte(cut: int) -> None:
    frames = ReplyFrames(LENGTH_PREFIXED)
    for _ in range(2):
        received = [frames.feed(bytearray(part + b"stale"), len(part)) for part in (REPLY[:cut], REPLY[cut:]) if part]
        assert received == [False] * (len(received) - 1) + [True]
        assert frames.reply_bytes == len(REPLY)


def test_more_bytes_than_one_reply_end_the_benchmark() -> None:
    with pytest.raises(BenchFailed, match="received 3 bytes more than one reply"):
        ReplyFrames(LENGTH_PREFIXED).feed(REPLY + b"abc", len(REPLY) + 3)


@pytest.mark.parametrize("kind", Kind)
def test_the_bare_server_answers_each_request_with_the_bytes_asked_for(kind: Kind, bare: Bare) -> None:
    with connected(bare.tcp, 3) as socks:
        for sock in socks:
            sock.sendall(head(kind, 100, 70))
        requesters = [Requester(sock, iter([bytes(100)] * 5), fixed(70)) for sock in socks]
        result = exchange(requesters, 60.0, bare.cpu_seconds)
        assert 5 <= len(result.latencies) <= result.requests <= 15
        assert {requester.request_bytes for requester in requesters} == {100}
        with pytest.raises(BlockingIOError):
            socks[0].recv(1, socket.MSG_DONTWAIT)


def test_the_bare_server_takes_requests_in_any_chunks(bare: Bare) -> None:
    with connected(bare.tcp) as (sock,):
        for byte in head(Kind.ECHO, 4, 2) + bytes(8):
            sock.sendall(bytes([byte]))
        assert receive_exactly(sock, 4) == bytes(4)


def test_a_closed_loop_of_no_seconds_sends_one_request_on_each_connection(bare: Bare) -> None:
    with connected(bare.tcp, 4) as socks:
        for sock in socks:
            sock.sendall(head(Kind.ECHO, 10, 10))
        result = exchange([Requester(sock, itertools.repeat(bytes(10)), fixed(10)) for sock in socks], 0.0, no_cpu)
    assert len(result.latencies) == 1
    assert result.uncounted == 3


def test_a_short_measurement_counts_a_reply_of_each_connection(bare: Bare) -> None:
    with connected(bare.tcp, 4) as socks:
        for sock in socks:
            sock.sendall(head(Kind.ECHO, 10, 10))
        result = exchange([Requester(sock, itertools.repeat(bytes(10)), fixed(10)) for sock in socks], 1e-9, no_cpu)
    assert len(result.latencies) >= 4


def test_a_closed_connection_ends_the_benchmark() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        requester = Requester(ours, itertools.repeat(b"request"), fixed(10))
        theirs.sendall(b"half")
        theirs.shutdown(socket.SHUT_WR)
        with theirs, pytest.raises(BenchFailed, match="closed the connection"):
            exchange([requester], 60.0, no_cpu)


@pytest.mark.parametrize(
    ("protocol", "reply"),
    [
        ("figg", figg.pong(1)),
        ("blipmq", blipmq.nack(1, 413, "too large")),
        ("flymq", encode_failure(Failure("no such topic"), FlyMqDialect.SPEC)),
        ("rustlog", encode_reply(Dialect.BINARY, rustlog_errors.internal("no such topic", retriable=False))),
    ],
)
def test_an_error_reply_ends_the_benchmark(protocol: str, reply: bytes) -> None:
    with pytest.raises(BenchFailed, match=protocol):
        ReplyFrames(PUBLISHED[protocol]).feed(reply, len(reply))


def test_only_operations_of_the_protocol_are_measured() -> None:
    assert operations_of("rustlog", ["publish", "fetch-1", "consume"]) == ["publish", "fetch-1"]
    assert operations_of("flymq", ["publish", "fetch-1", "consume"]) == ["publish", "fetch-1", "consume"]


def exchanged(rate: int, latency: float, cpu: float) -> Exchanged:
    return Exchanged(1.0, array("d", [latency] * rate), peer_cpu_seconds=cpu)


@pytest.mark.parametrize(
    ("protocol", "operation", "connections", "target"),
    [
        ("flymq", "fetch-10", 16, Target(at_least=0.4)),
        ("flymq", "fetch-10", 64, None),
        ("flymq", "fetch-500", 16, None),
        ("blipmq", "consume", 1, Target(at_least=0.4)),
        ("figg", "publish", 64, Target(at_least=0.7)),
        ("figg", "publish", 1, None),
        ("fujin", "publish", 16, Target(at_least=0.6)),
        ("fujin", "publish", 64, None),
    ],
)
def test_a_ratio_has_the_target_of_its_operation(protocol: str, operation: str, connections: int, target: Target | None) -> None:
    assert Point(protocol, operation, connections).target == target


def test_the_figures_of_a_read_are_rates_ratio_and_cpu_time() -> None:
    point = Point("flymq", "fetch-10", 16, [exchanged(100, 0.01, 0.002)], [exchanged(400, 0.002, 0.001)])
    ours, bare, ratio, cpu = point.figures()
    assert (ours.value, bare.value) == (100, 400)
    assert (ratio.value, ratio.met) == (0.25, False)
    assert cpu.value == pytest.approx(20)
    assert cpu.met is True
    assert ours.notes == {"p50": 10.0, "p99": 10.0, "p99.9": 10.0, "CPU µs": 20.0}


def test_one_publish_at_a_time_is_compared_with_the_bare_median() -> None:
    point = Point("figg", "publish", 1, [exchanged(100, 0.0010, 0.0)], [exchanged(100, 0.0007, 0.0)])
    *_, above = point.figures()
    assert (above.name, above.met) == ("figg publish, 1 connection, above bare", False)
    assert above.value == pytest.approx(0.3)


def test_the_bare_server_leaves_with_its_parent(tmp_path: Path) -> None:
    with bare_server(tmp_path) as running:
        assert running.cpu_seconds() >= 0
    assert not Path(f"/proc/{running.pid}").exists()
