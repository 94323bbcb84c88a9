"""Latency counts from the intended send time of a record."""

from __future__ import annotations

import socket
import threading
import time
from array import array
from pathlib import Path

import pytest

from headrace.bench import latency as module
from headrace.bench.bare import bare_server
from headrace.bench.latency import (
    OpenLoop,
    Replies,
    Slots,
    commit_figure,
    commit_loop,
    figures,
    loaded_figure,
    maximum_records,
    open_loop,
    publish_slots,
    round_trips,
    summary,
)
from headrace.bench.protocols.figg import FiggLoad
from headrace.bench.report import percentile
from headrace.wire.figg import encode
from headrace.wire.figg.decode import Decoder
from headrace.wire.figg.frames import PublishBatch, Role


def acknowledging(sock: socket.socket, stall_seconds: float) -> None:
    """Acknowledge everything at once, except for one stall before the first acknowledgement."""
    decoder, stalled = Decoder(Role.SERVER), False
    while data := sock.recv(65536):
        for message in decoder.feed(data):
            assert isinstance(message, PublishBatch)
            if not stalled:
                time.sleep(stall_seconds)
                stalled = True
            sock.sendall(encode.ack(message.seqs[-1]))


def acknowledging_each(sock: socket.socket) -> None:
    """Acknowledge each record with a frame of its own, and read nothing while one is unsent."""
    decoder = Decoder(Role.SERVER)
    while data := sock.recv(65536):
        for message in decoder.feed(data):
            assert isinstance(message, PublishBatch)
            sock.sendall(encode.acks(message.seqs))


def test_a_reply_covers_all_records_below_its_count() -> None:
    replies = Replies(times=[0.010, 0.030], counts=[2, 3])
    assert list(replies.latencies(1_000, 3)) == pytest.approx([0.010, 0.009, 0.028])


def test_an_unsent_record_has_at_least_the_latency_until_the_end() -> None:
    replies = Replies(times=[0.010, 0.030], counts=[2, 2])
    assert list(replies.latencies(1_000, 4)) == pytest.approx([0.010, 0.009, 0.028, 0.027])


def test_a_slot_is_sent_when_its_last_record_is_due() -> None:
    slots = Slots(lambda first, end: bytes(range(first, end)), rate=20_000, records=5)
    assert slots.take(0.0) == b""
    assert slots.due_in(0.0) == pytest.approx(1 / 20_000)
    assert slots.take(3 / 20_000) == bytes(range(4))
    assert slots.take(1.0) == bytes([4])
    assert slots.taken == 5


def test_slots_beyond_the_memory_limit_are_encoded_when_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_READY_BYTES_MAX", 3)
    encoded: list[int] = []

    def encode(first: int, end: int) -> bytes:
        encoded.append(first)
        return bytes([first])

    slots = Slots(encode, rate=1_000, records=10)
    assert encoded == [0, 1, 2]
    assert slots.prepare() is False
    assert slots.take(1.0) == bytes(range(10))


def test_a_stall_shows_in_every_record_that_was_due_in_it() -> None:
    ours, theirs = socket.socketpair()
    stall, rate, records = 0.2, 1_000, 300
    thread = threading.Thread(target=acknowledging, args=(theirs, stall))
    thread.start()
    try:
        slots = publish_slots(FiggLoad(), "t", rate=rate, records=records, value_bytes=10)
        latencies = open_loop(ours, slots, FiggLoad().acks("t")).latencies
    finally:
        ours.close()
        thread.join(60)
        theirs.close()
    assert len(latencies) == records
    for index in range(150):
        assert latencies[index] >= stall - index / rate - 0.001


def test_replies_are_read_while_the_socket_is_full() -> None:
    """The peer stops reading until its acknowledgements are read, as the broker does."""
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    thread = threading.Thread(target=acknowledging_each, args=(theirs,))
    thread.start()
    try:
        slots = publish_slots(FiggLoad(), "t", rate=1_000_000, records=20_000, value_bytes=10)
        loop = open_loop(ours, slots, FiggLoad().acks("t"))
    finally:
        ours.close()
        thread.join(60)
        theirs.close()
    assert len(loop.latencies) == 20_000
    assert loop.unsent == 0


def test_a_loop_that_cannot_keep_its_rate_ends_and_counts_the_unsent_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LATE_SECONDS_MAX", 0.0)
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=acknowledging, args=(theirs, 0.2))
    thread.start()
    try:
        slots = publish_slots(FiggLoad(), "t", rate=1_000_000, records=50_000, value_bytes=1_000)
        loop = open_loop(ours, slots, FiggLoad().acks("t"))
    finally:
        ours.close()
        thread.join(60)
        theirs.close()
    assert len(loop.latencies) == 50_000
    assert 0 < loop.unsent < 50_000
    assert min(loop.latencies) > 0
    shown = figures("figg", "durable", 10, [loop], [[0.005]], [[0.003]])[0]
    assert (shown.notes["not sent in time"], shown.notes["of"]) == (loop.unsent, 50_000)


def test_round_trips_are_acknowledged_one_by_one() -> None:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=acknowledging, args=(theirs, 0.0))
    thread.start()
    try:
        times, probes = round_trips(ours, FiggLoad(), "t", count=20, value_bytes=10, probe=lambda: 0.5)
    finally:
        ours.close()
        thread.join(60)
        theirs.close()
    assert len(times) == 20
    assert probes == [0.5] * 20
    assert min(times) > 0


def test_percentiles_come_from_the_histogram() -> None:
    shown = summary([index / 1e3 for index in range(1, 1001)])
    assert shown["p50"] == pytest.approx(500, rel=0.002)
    assert shown["p99.9"] == pytest.approx(999, rel=0.002)
    assert shown["max"] == pytest.approx(1000, rel=0.002)
    assert str(shown["hdr"]).startswith("HIST")


def test_the_round_trip_is_shown_above_the_machine() -> None:
    loop, trips, machine, above = figures("figg", "durable", 10, [OpenLoop(array("d", [0.001]))], [[0.005, 0.005]], [[0.003, 0.003]])
    assert (loop.value, trips.value, machine.value) == (1.0, 5.0, 3.0)
    assert above.value == pytest.approx(2.0)
    assert above.met is False


def test_the_target_under_load_is_for_half_of_the_maximum_of_figg_and_flymq() -> None:
    loops = [OpenLoop(array("d", [0.001] * 98 + [0.02] * 2))]
    figure = loaded_figure("figg", "durable", 50, 1_000, loops)
    assert figure.value == pytest.approx(20) and figure.met is False
    assert figure.notes == {"maximum records/s": 1_000}
    others = [("blipmq", "durable", 50), ("figg", "written", 50), ("flymq", "durable", 60)]
    assert [loaded_figure(protocol, ack, percent, 1, loops).target for protocol, ack, percent in others] == [None] * 3


@pytest.mark.parametrize(("value_bytes", "records"), [(0, 500_000), (100, 500_000), (1 << 20, 256), (1 << 29, 1)])
def test_the_maximum_rate_is_measured_with_a_bounded_number_of_bytes(value_bytes: int, records: int) -> None:
    assert maximum_records(value_bytes) == records


def test_the_bare_group_commit_gets_the_bytes_of_all_records_at_their_rate(tmp_path: Path) -> None:
    with bare_server(tmp_path) as bare:
        loop = commit_loop(bare.tcp, FiggLoad(), "t", rate=50_000, records=10_000, value_bytes=10)
    assert len(loop.latencies) == 10_000 // 5, "the five records of 0.1 ms are one request"
    assert loop.unsent == 0 and min(loop.latencies) > 0
    assert (tmp_path / "bare.journal").stat().st_size > 0
    figure = commit_figure([loop, loop])
    assert figure.unit == "ms p99" and figure.target is None
    assert figure.runs[0] == figure.runs[1] == pytest.approx(percentile(sorted(loop.latencies), 99) * 1e3)
