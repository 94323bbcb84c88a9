"""Latency counts from the intended send time of a record."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from headrace.bench.latency import Replies, figures, open_loop, round_trips, summary
from headrace.bench.protocols.figg import FiggLoad
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


def test_a_reply_covers_all_records_below_its_count() -> None:
    replies = Replies(times=[0.010, 0.030], counts=[2, 3])
    assert replies.latencies(0.001, 3) == pytest.approx([0.010, 0.009, 0.028])


def test_a_stall_shows_in_every_record_that_was_due_in_it() -> None:
    ours, theirs = socket.socketpair()
    stall, rate, records = 0.2, 1_000, 300
    thread = threading.Thread(target=acknowledging, args=(theirs, stall))
    thread.start()
    try:
        latencies = open_loop(ours, FiggLoad(), "t", rate=rate, records=records, value_bytes=10)
    finally:
        ours.close()
        thread.join(60)
        theirs.close()
    assert len(latencies) == records
    for index in range(150):
        assert latencies[index] >= stall - index / rate - 0.001


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
    loop, trips, machine, above = figures("figg", "durable", 10, [[0.001]], [[0.005, 0.005]], [[0.003, 0.003]])
    assert (loop.value, trips.value, machine.value) == (1.0, 5.0, 3.0)
    assert above.value == pytest.approx(2.0)
    assert above.met is False
