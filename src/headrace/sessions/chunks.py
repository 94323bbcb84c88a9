"""Publish independent records of one batch: a record that violates the schema of its topic does not fail the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

from headrace.errors import BrokerError, InvalidRecord

T = TypeVar("T")


def publish_in_chunks(publish: Callable[[int, int], T], count: int) -> Iterator[tuple[int, int, T | BrokerError]]:
    """Yield (begin, end, outcome) for each part of the batch in order. `publish` publishes the records from `begin` to `end`."""
    begin = 0
    while begin < count:
        try:
            yield begin, count, publish(begin, count)
            return
        except InvalidRecord as error:
            found = error
        except BrokerError as error:
            yield begin, count, error
            return
        at = begin + found.index
        if at > begin:
            try:
                before: T | BrokerError = publish(begin, at)
            except BrokerError as error:
                before = error
            yield begin, at, before
        yield at, at + 1, InvalidRecord(index=0, faults=found.faults, schema=found.schema)
        begin = at + 1
