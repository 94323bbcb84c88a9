"""Sample orders and their expected totals.

The totals are computed without Spark, to compare them with those of the pipeline.
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
    """Value of a record, in JSON."""

    order: str
    customer: str
    country: str
    amount_cents: int
    at: datetime.datetime


class Total(msgspec.Struct, frozen=True):
    """Totals of one minute, as the pipeline publishes them."""

    minute: str
    orders: int
    amount_cents: int


_encode = msgspec.json.Encoder().encode
_read_order = msgspec.json.Decoder(Order).decode
_read_total = msgspec.json.Decoder(Total).decode


class Maker:
    """Generates the orders of one protocol. About 1 % are malformed."""

    def __init__(self, prefix: str, rng: random.Random, malformed_fraction: float = 0.01) -> None:
        self._prefix, self._rng, self._malformed_fraction = prefix, rng, malformed_fraction
        self._made = 0

    def make(self, count: int, now_ms: int) -> list[bytes]:
        return [self._one(now_ms) for _ in range(count)]

    def _one(self, now_ms: int) -> bytes:
        self._made += 1
        rng = self._rng
        at = datetime.datetime.fromtimestamp(now_ms / 1000, datetime.UTC)
        order = Order(
            f"{self._prefix}-{self._made}", f"customer-{rng.randrange(500):03d}", rng.choice(_COUNTRIES), rng.randrange(100, 50_000), at
        )
        good = _encode(order)
        return good if rng.random() >= self._malformed_fraction else self._spoil(good)

    def _spoil(self, good: bytes) -> bytes:
        match self._rng.randrange(3):
            case 0:
                return good[: len(good) // 2]
            case 1:
                return good.replace(b'"amount_cents":', b'"amount_cents":"a lot","was":')
            case _:
                return b"\xff\xfe no order at all: " + self._prefix.encode() + str(self._made).encode()


@dataclass(slots=True)
class Sums:
    """Totals by minute and the number of malformed orders."""

    by_minute: dict[str, Total] = field(default_factory=dict)
    malformed: int = 0

    @property
    def orders(self) -> int:
        return sum(total.orders for total in self.by_minute.values())

    @property
    def amount_cents(self) -> int:
        return sum(total.amount_cents for total in self.by_minute.values())

    def add(self, values: Iterable[bytes]) -> None:
        """Count orders."""
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
    """Yield the published totals, oldest first. The last total of a minute is valid."""
    for value in values:
        if value is not None:
            yield _read_total(value)
