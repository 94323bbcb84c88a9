"""Orders: what the sample traffic is made of, and what it should add up to.

The totals are computed here without Spark, so that they can be held against those of the pipeline.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

import msgspec

TOPIC: Final = "orders"
TOTALS_TOPIC: Final = "orders.by_minute"
DEAD_LETTER_TOPIC: Final = "orders.dlq"
_COUNTRIES: Final = ("AT", "BR", "DE", "FR", "IN", "JP", "KE", "NO", "US")


class Order(msgspec.Struct):
    """The value of a record, as JSON."""

    order: str
    customer: str
    country: str
    amount_cents: int
    at: datetime.datetime


class Total(msgspec.Struct, frozen=True):
    """What the pipeline says about one minute."""

    minute: str
    orders: int
    amount_cents: int


_encode = msgspec.json.Encoder().encode
_read_order = msgspec.json.Decoder(Order).decode
_read_total = msgspec.json.Decoder(Total).decode


class Maker:
    """Makes the orders of one protocol. About one in a hundred is not an order at all."""

    def __init__(self, prefix: str, dice: random.Random, malformed_share: float = 0.01) -> None:
        self._prefix, self._dice, self._malformed_share = prefix, dice, malformed_share
        self._made = 0

    def make(self, count: int, now_ms: int) -> list[bytes]:
        return [self._one(now_ms) for _ in range(count)]

    def _one(self, now_ms: int) -> bytes:
        self._made += 1
        dice = self._dice
        at = datetime.datetime.fromtimestamp(now_ms / 1000, datetime.UTC)
        order = Order(
            f"{self._prefix}-{self._made}",
            f"customer-{dice.randrange(500):03d}",
            dice.choice(_COUNTRIES),
            dice.randrange(100, 50_000),
            at,
        )
        good = _encode(order)
        return good if dice.random() >= self._malformed_share else self._spoil(good)

    def _spoil(self, good: bytes) -> bytes:
        match self._dice.randrange(3):
            case 0:
                return good[: len(good) // 2]
            case 1:
                return good.replace(b'"amount_cents":', b'"amount_cents":"a lot","was":')
            case _:
                return b"\xff\xfe no order at all: " + self._prefix.encode() + str(self._made).encode()


@dataclass(slots=True)
class Sums:
    """Orders by minute, and what was none."""

    by_minute: dict[str, Total] = field(default_factory=dict)
    malformed: int = 0

    @property
    def orders(self) -> int:
        return sum(total.orders for total in self.by_minute.values())

    @property
    def amount_cents(self) -> int:
        return sum(total.amount_cents for total in self.by_minute.values())

    def add(self, values: Iterable[bytes]) -> None:
        """Count what the log holds."""
        for value in values:
            try:
                order = _read_order(value)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.malformed += 1
                continue
            minute = order.at.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")
            before = self.by_minute.get(minute, Total(minute, 0, 0))
            self.by_minute[minute] = Total(minute, before.orders + 1, before.amount_cents + order.amount_cents)


def read_totals(values: Iterable[bytes | None]) -> Iterator[Total]:
    """What the pipeline has published, oldest first: the last word about a minute counts."""
    for value in values:
        if value is not None:
            yield _read_total(value)
