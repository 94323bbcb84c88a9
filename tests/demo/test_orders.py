"""The sample orders and their expected totals."""

from __future__ import annotations

import random

from headrace.demo.orders import Maker, Sums, Total, read_totals

NOON_MS = 1_763_208_000_000


def made(count: int, malformed_share: float, seed: int = 1) -> list[bytes]:
    return Maker("run-figg", random.Random(seed), malformed_share).make(count, NOON_MS)


def test_orders_differ_and_all_count_where_none_is_malformed() -> None:
    values = made(200, 0.0)
    assert len(set(values)) == 200
    sums = Sums()
    sums.add(values)
    assert sums.malformed == 0
    assert sums.orders == 200
    assert list(sums.by_minute) == ["2025-11-15T12:00Z"]


def test_every_way_of_spoiling_an_order_makes_it_uncountable_and_keeps_it_distinct() -> None:
    values = made(300, 1.0)
    sums = Sums()
    sums.add(values)
    assert sums.malformed == 300
    assert sums.orders == 0
    assert len(set(values)) == 300


def test_minutes_are_summed_apart() -> None:
    maker = Maker("run", random.Random(2), 0.0)
    sums = Sums()
    sums.add(maker.make(3, NOON_MS))
    sums.add(maker.make(2, NOON_MS + 60_000))
    assert [total.orders for total in sums.by_minute.values()] == [3, 2]
    assert sums.amount_cents == sum(total.amount_cents for total in sums.by_minute.values()) > 0


def test_what_the_pipeline_says_is_read_back_and_tombstones_say_nothing() -> None:
    said = list(read_totals([b'{"minute":"m","orders":1,"amount_cents":5}', None, b'{"minute":"m","orders":2,"amount_cents":9}']))
    assert said == [Total("m", 1, 5), Total("m", 2, 9)]
