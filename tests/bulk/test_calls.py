"""Calls are counted, and what is kept for them is given back when nobody calls."""

from __future__ import annotations

import asyncio

import pytest

import headrace.bulk.lane
from headrace.bulk.calls import Calls
from headrace.bulk.memory import give_back, keep_large_pieces
from headrace.errors import Unavailable
from tests.bulk.stand import standing
from tests.bulk.test_bounds import eventually


def test_one_call_too_many_is_refused_and_counts_for_nothing() -> None:
    calls = Calls(2)
    calls.begin()
    calls.begin()
    with pytest.raises(Unavailable, match="2 calls are being served already"):
        calls.begin()
    assert (calls.under_way, calls.begun) == (2, 2)
    calls.end()
    calls.begin()
    assert (calls.under_way, calls.begun) == (2, 3)


def test_memory_can_be_kept_and_given_back() -> None:
    assert keep_large_pieces()
    give_back()


def test_memory_is_given_back_once_after_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []
    monkeypatch.setattr(headrace.bulk.lane, "_QUIET_SECONDS", 0.01)
    monkeypatch.setattr(headrace.bulk.lane, "give_back", lambda: given.append(1))
    with standing() as stand, stand.client() as bulk:
        stand.run(asyncio.sleep(0.1))
        assert given == [], "nobody has called yet"
        bulk.topics()
        eventually(lambda: given == [1], "it is not given back")
        stand.run(asyncio.sleep(0.1))
        assert given == [1]
        bulk.topics()
        eventually(lambda: given == [1, 1], "it is not given back again")
