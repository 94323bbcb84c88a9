"""Hooks for traces. Without a tracer, a publish or delivery costs one comparison with None.

A record carries its trace in the header `traceparent` (W3C Trace Context). The broker stores and delivers it unchanged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any, Final, Protocol

from headrace.engine.contract import Batch
from headrace.records import AnyBatch, Headers

TRACEPARENT: Final = "traceparent"
RECORDS_READ_MAX: Final = 16
"""Records of a delivery whose headers are read."""


class Tracer(Protocol):
    """Receives one call per batch and decides which are traced."""

    def publish(self, topic: str, protocol: str, batch: AnyBatch) -> Callable[[asyncio.Future[Any]], None] | None:
        """Return a function to call when the append is done, or None for a batch that is not traced."""

    def deliver(self, topic: str, protocol: str, records: int, headers: Iterable[Headers]) -> None:
        """Record a delivery. `headers` are those of its first records."""


def traceparent(headers: Headers) -> str | None:
    """Return the value of the header, if there is one."""
    for name, value in headers:
        if name == TRACEPARENT and value is not None:
            return value.decode("ascii", "replace")
    return None


def headers_of(batches: Iterable[Batch]) -> list[Headers]:
    """Return the headers of the first records that have any."""
    return list(islice((pairs for batch in batches for pairs in batch.headers() or () if pairs), RECORDS_READ_MAX))


def first_headers(batch: AnyBatch) -> Headers:
    """Return the headers of the first record."""
    headers = batch[0:1].headers
    return headers[0] if headers else ()
