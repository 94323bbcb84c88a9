"""The verification fails if an order is lost, duplicated or miscounted."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from headrace.demo.demo import verify
from headrace.demo.orders import DEAD_LETTER_TOPIC, TOPIC, TOTALS_TOPIC, Maker, Sums
from headrace.errors import UnknownTopic
from headrace.flight.client import FlightClient

NOON_MS = 1_763_208_000_000


@dataclass
class Bounds:
    first: int
    end: int


@dataclass
class State:
    partitions: tuple[Bounds, ...]


class FakeBulk:
    """Flight client over lists."""

    def __init__(self, topics: dict[str, list[bytes]]) -> None:
        self.topics = topics

    def describe(self, names: Sequence[str]) -> dict[str, State]:
        for name in names:
            if name not in self.topics:
                raise UnknownTopic(name)
        return {name: State((Bounds(0, len(self.topics[name])),)) for name in names}

    def read(self, topic: str, partition: int, start: int, stop: int, *, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"value": pa.array(self.topics[topic][start:stop], pa.binary())})


class Execution:
    """A correct execution, which the tests modify."""

    def __init__(self, path: Path) -> None:
        self.sent = Maker("run", random.Random(1), 0.1).make(100, NOON_MS)
        self.table = path / "table"
        sums = Sums()
        sums.add(self.sent)
        (self.total,) = sums.by_minute.values()
        said = {"minute": self.total.minute, "orders": self.total.orders, "amount_cents": self.total.amount_cents}
        self.topics = {
            TOPIC: list(self.sent),
            TOTALS_TOPIC: [json.dumps({**said, "orders": 1}).encode(), json.dumps(said).encode()],
            DEAD_LETTER_TOPIC: [b"dead"] * sums.malformed,
        }
        self.write_table(**said)

    def write_table(self, **row: object) -> None:
        write_deltalake(str(self.table), pa.Table.from_pylist([row]), mode="overwrite")

    def verdicts(self) -> list[bool]:
        return [check.holds for check in verify(cast(FlightClient, FakeBulk(self.topics)), self.sent, self.table)]


@pytest.fixture
def execution(tmp_path: Path) -> Execution:
    return Execution(tmp_path)


def test_all_checks_hold_for_a_correct_execution(execution: Execution) -> None:
    assert execution.verdicts() == [True, True, True, True]


def test_a_lost_order_is_found(execution: Execution) -> None:
    execution.sent.append(b"acknowledged and gone")
    assert execution.verdicts()[0] is False


def test_a_doubled_order_is_found_and_the_totals_do_not_match_either(execution: Execution) -> None:
    execution.topics[TOPIC].append(next(value for value in execution.sent if value.startswith(b"{") and value.endswith(b"}")))
    assert execution.verdicts()[:1] == [False]


def test_a_wrong_total_in_the_topic_is_found(execution: Execution) -> None:
    execution.topics[TOTALS_TOPIC].pop()
    assert execution.verdicts() == [True, False, True, True]


def test_a_wrong_total_in_the_table_is_found(execution: Execution) -> None:
    execution.write_table(minute=execution.total.minute, orders=execution.total.orders, amount_cents=execution.total.amount_cents + 1)
    assert execution.verdicts() == [True, True, False, True]


def test_a_table_that_is_not_there_does_not_match(execution: Execution) -> None:
    execution.table = execution.table.parent / "elsewhere"
    assert execution.verdicts() == [True, True, False, True]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_dead_letter_too_few_or_too_many_is_found(execution: Execution, change: int) -> None:
    dead = execution.topics[DEAD_LETTER_TOPIC]
    execution.topics[DEAD_LETTER_TOPIC] = [b"dead"] * (len(dead) + change)
    assert execution.verdicts() == [True, True, True, False]


def test_orders_of_earlier_executions_count_in_the_totals_and_are_not_duplicates(execution: Execution) -> None:
    execution.sent = execution.sent[:50]
    assert execution.verdicts() == [True, True, True, True]
