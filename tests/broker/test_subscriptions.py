from __future__ import annotations

import pytest

from headrace.broker.groups.subscriptions import SubscriptionBook, SubscriptionRow
from headrace.errors import DiskFull
from tests.broker.harness import Harness

ROW = SubscriptionRow("t", "ann", "g-1")


async def _book(harness: Harness, protocol: str = "protocol") -> SubscriptionBook:
    book = SubscriptionBook(harness.engine, protocol)
    await book.load()
    return book


async def test_what_is_entered_is_there_after_a_restart_and_what_is_struck_out_is_not(harness: Harness) -> None:
    book = await _book(harness)
    await book.put({1: ROW, 2: ROW})
    await book.put({3: ROW, 2: None})
    assert await SubscriptionBook(harness.engine, "protocol").load() == {1: ROW, 3: ROW}


async def test_no_number_is_given_twice_not_even_over_restarts(harness: Harness) -> None:
    given = list[int]()
    for _ in range(3):
        book = await _book(harness)
        given += [await book.new_id() for _ in range(1_500)]
    assert len(set(given)) == 4_500
    assert given[0] == 1


async def test_a_number_that_could_not_be_reserved_is_not_given(harness: Harness) -> None:
    book = await _book(harness)
    harness.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await book.new_id()
    harness.engine.error = None
    assert await book.new_id() == 1


async def test_protocols_keep_their_own_books(harness: Harness) -> None:
    await (await _book(harness, "one")).put({1: ROW})
    assert await SubscriptionBook(harness.engine, "two").load() == {}
