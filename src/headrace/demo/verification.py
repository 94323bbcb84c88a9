"""Verification: every published order is in the log once, and the totals of the pipeline match the orders.

The checks read the topics through the Flight endpoint and the table from its files. They include earlier executions on the same data
directory, which the pipeline has counted too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headrace.demo.orders import DEAD_LETTER_TOPIC, TOPIC, TOTALS_TOPIC, Sums, Total, read_totals
from headrace.errors import UnknownTopic
from headrace.flight.client import FlightClient


@dataclass(frozen=True, slots=True)
class Check:
    """A claim, whether it holds, and the numbers that show it."""

    claim: str
    holds: bool
    numbers: str


def values_of(flight_client: FlightClient, topic: str, positions: dict[int, int] | None = None) -> Iterator[bytes | None]:
    """Yield all values of a topic, or those from `positions`, which it advances."""
    try:
        partitions = flight_client.describe([topic])[topic].partitions
    except UnknownTopic:
        return
    for number, bounds in enumerate(partitions):
        first = bounds.first if positions is None else max(positions.get(number, 0), bounds.first)
        if first < bounds.end:
            for batch in flight_client.read(topic, number, first, bounds.end, columns=["value"]):
                yield from batch.column(0).to_pylist()
        if positions is not None:
            positions[number] = bounds.end


def verify(flight_client: FlightClient, sent: Iterable[bytes], table: Path) -> list[Check]:
    """Return all checks. `sent` contains every record acknowledged in this execution."""
    kept = Counter(value for value in values_of(flight_client, TOPIC) if value is not None)
    expected = Sums()
    expected.add(kept.elements())
    return [_sent_once(Counter(sent), kept), *_totals(flight_client, expected, table), _dead_letters(flight_client, expected)]


def _sent_once(sent: Counter[bytes], kept: Counter[bytes]) -> Check:
    lost = sum((sent - kept).values())
    doubled = sum(kept[value] - count for value, count in sent.items() if kept[value] > count)
    return Check(
        "every acknowledged order is in the log exactly once",
        not lost and not doubled,
        f"{sum(sent.values()):,} sent, {lost:,} lost, {doubled:,} doubled",
    )


def _totals(flight_client: FlightClient, expected: Sums, table: Path) -> Iterator[Check]:
    published = {total.minute: total for total in read_totals(values_of(flight_client, TOTALS_TOPIC))}
    yield _compare(f"the totals in topic {TOTALS_TOPIC} match", published, expected)
    yield _compare(f"the totals in the Delta table {table.name} match", _in_table(table), expected)


def _compare(claim: str, found: dict[str, Total], expected: Sums) -> Check:
    wrong = sorted(minute for minute in found.keys() | expected.by_minute.keys() if found.get(minute) != expected.by_minute.get(minute))
    counted = sum(total.orders for total in found.values())
    cents = sum(total.amount_cents for total in found.values())
    numbers = f"{counted:,} of {expected.orders:,} orders, {cents / 100:,.2f} of {expected.amount_cents / 100:,.2f} in {len(found)} minutes"
    return Check(claim, not wrong, numbers + (f"; wrong: {', '.join(wrong[:3])}" if wrong else ""))


def _in_table(path: Path) -> dict[str, Total]:
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(str(path)):
        return {}
    rows = DeltaTable(str(path)).to_pyarrow_table().to_pylist()
    return {row["minute"]: Total(row["minute"], row["orders"], row["amount_cents"]) for row in rows}


def _dead_letters(flight_client: FlightClient, expected: Sums) -> Check:
    dead = sum(1 for _ in values_of(flight_client, DEAD_LETTER_TOPIC))
    return Check(
        "every malformed order is dead-lettered exactly once",
        dead == expected.malformed,
        f"{dead:,} of {expected.malformed:,}",
    )
