"""Group values into batches for `publish_many` and `send_many`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, TypeVar

from headrace.clients.messages import Key
from headrace.limits import KIB

BATCH_BYTES_MAX: Final = 256 * KIB
_Done = TypeVar("_Done")
_Wanted = TypeVar("_Wanted")


async def batches_of(values: Iterable[bytes] | AsyncIterable[bytes], records_max: int) -> AsyncIterator[list[bytes]]:
    """Group values into batches. Values of an asynchronous iterable are sent one by one: the next may take arbitrarily long."""
    if isinstance(values, AsyncIterable):
        async for value in values:
            yield [value]
        return
    iterator = iter(values)
    while batch := _next_batch(iterator, records_max):
        yield batch


def _next_batch(values: Iterator[bytes], records_max: int) -> list[bytes]:
    batch: list[bytes] = []
    size_bytes = 0
    for value in islice(values, records_max):
        batch.append(value)
        size_bytes += len(value)
        if size_bytes >= BATCH_BYTES_MAX:
            break
    return batch


def keys_of(key: Key, values: Sequence[bytes]) -> list[bytes | None] | None:
    """Return the key of each value; None if there are no keys."""
    if key is None:
        return None
    return [key(value) for value in values] if callable(key) else [key] * len(values)


def then(done: asyncio.Future[_Done], make: Callable[[_Done], _Wanted]) -> asyncio.Future[_Wanted]:
    """Return a future with `make` applied to the result of `done`, or with its failure."""
    wanted: asyncio.Future[_Wanted] = done.get_loop().create_future()

    def hand_over(done: asyncio.Future[_Done]) -> None:
        if wanted.done():
            return
        if done.cancelled():
            wanted.cancel()
        elif (failure := done.exception()) is not None:
            wanted.set_exception(failure)
            wanted.exception()  # retrieved: `close` reports it even if the future is never awaited
        else:
            wanted.set_result(make(done.result()))

    done.add_done_callback(hand_over)
    return wanted
