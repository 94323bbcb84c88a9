"""Calls are counted, and unused memory is released when no call is in progress."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

import headrace.flight.endpoint
from headrace.errors import Unavailable
from headrace.flight.calls import Calls
from headrace.flight.endpoint import release_unused, resident_bytes
from headrace.limits import FLIGHT_STALL_SECONDS_MAX
from headrace.records import RecordBatch
from tests.flight.harness import DEADLINE_SECONDS, rows, running_harness, values
from tests.flight.test_bounds import eventually


def test_one_call_too_many_is_rejected_and_counts_for_nothing() -> None:
    calls = Calls(2)
    first = calls.begin()
    calls.begin(carries_rows=True)
    with pytest.raises(Unavailable, match="2 calls are already in progress"):
        calls.begin(carries_rows=True)
    assert (calls.under_way, calls.carriers_under_way, calls.carriers_begun) == (2, 1, 1)
    calls.end(first)
    calls.begin(carries_rows=True)
    assert (calls.under_way, calls.carriers_under_way, calls.carriers_begun) == (2, 2, 2)


def test_the_call_that_waits_the_longest_for_its_peer_makes_room_but_not_too_soon() -> None:
    now, lost = [0.0], list[str]()
    calls = Calls(3, cut=lost.append, clock=lambda: now[0])
    ours, late, early = (calls.begin(name) for name in ("ours", "late", "early"))
    ours.peers_turn()
    ours.our_turn()
    early.peers_turn()
    now[0] = 1.0
    late.peers_turn()

    def one_more() -> list[str]:
        with pytest.raises(Unavailable):
            calls.begin("more")
        return lost

    now[0] = FLIGHT_STALL_SECONDS_MAX - 0.001
    assert one_more() == []
    now[0] = FLIGHT_STALL_SECONDS_MAX
    assert one_more() == ["early"]
    assert one_more() == ["early"], "it is on its way out, and the other one has some time left"
    now[0] += 1.0
    assert one_more() == ["early", "late"]
    now[0] += 1_000.0
    assert one_more() == ["early", "late"], "the third call does not wait for its peer"
    calls.end(early)
    calls.begin("more")


def test_memory_can_be_given_back() -> None:
    release_unused()


def test_memory_is_given_back_once_after_rows_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(headrace.flight.endpoint, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(headrace.flight.endpoint, "release_unused", lambda: given.append(1))
    with running_harness() as harness, harness.client() as flight_client, harness.client() as waiting:
        harness.topic("t")
        harness.topic("quiet")
        watch = threading.Thread(target=lambda: waiting.wait({"quiet": {0: 0}}, 30_000))
        watch.start()
        eventually(lambda: harness.endpoint._server.calls.under_way == 1, "no call waits")
        harness.run(asyncio.sleep(0.1))
        assert given == [], "no call has carried rows yet"
        flight_client.append("t", [values(b"x")])
        eventually(lambda: given == [1], "it is not given back while a call waits for records")
        harness.run(asyncio.sleep(0.1))
        assert given == [1]
        assert len(rows(flight_client, "t")) == 1
        eventually(lambda: given == [1, 1], "it is not given back again")
        harness.publish("quiet", RecordBatch([b"x"]))
        watch.join(DEADLINE_SECONDS)


def test_memory_above_the_limit_is_given_back_while_rows_move(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    resident = [0]
    monkeypatch.setattr(headrace.flight.endpoint, "FLIGHT_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(headrace.flight.endpoint, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(headrace.flight.endpoint, "release_unused", lambda: given.append(1))
    with running_harness() as harness, harness.client() as flight_client:
        harness.topic("t")

        def batches() -> Iterator[pa.RecordBatch]:
            yield values(b"x")
            eventually(lambda: harness.endpoint._server.calls.carriers_under_way == 1, "no call carries rows")
            harness.run(asyncio.sleep(0.1))
            assert given == [], "there is little to give back"
            resident[0] = 1 << 40
            eventually(lambda: len(given) > 1, "it is not given back")
            yield values(b"y")

        flight_client.append("t", batches())
    assert resident_bytes() > 1 << 20
