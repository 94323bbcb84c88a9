from __future__ import annotations

import pytest

from headrace.broker.groups.subscriptions import SubscriptionBook, SubscriptionRow
from headrace.errors import DiskFull
from tests.broker.stand import Stand

ROW = SubscriptionRow("t", "ann", "g-1")


async def _book(stand: Stand, protocol: str = "protocol") -> SubscriptionBook:
    book = SubscriptionBook(stand.engine, protocol)
    await book.load()
    return book


async def test_what_is_entered_is_there_after_a_restart_and_what_is_struck_out_is_not(stand: Stand) -> None:
    book = await _book(stand)
    await book.put({1: ROW, 2: ROW})
    await book.put({3: ROW, 2: None})
    assert await SubscriptionBook(stand.engine, "protocol").load() == {1: ROW, 3: ROW}


async def test_no_number_is_given_twice_not_even_over_restarts(stand: Stand) -> None:
    given = list[int]()
    for _ in range(3):
        book = await _book(stand)
        given += [await book.new_id() for _ in range(1_500)]
    assert len(set(given)) == 4_500
    assert given[0] == 1


async def test_a_number_that_could_not_be_reserved_is_not_given(stand: Stand) -> None:
    book = await _book(stand)
    stand.engine.error = DiskFull("full")
    with pytest.raises(DiskFull):
        await book.new_id()
    stand.engine.error = None
    assert await book.new_id() == 1


async def test_protocols_keep_their_own_books(stand: Stand) -> None:
    await (await _book(stand, "one")).put({1: ROW})
    assert await SubscriptionBook(stand.engine, "two").load() == {}
