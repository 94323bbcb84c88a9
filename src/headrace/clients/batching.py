"""Many values become runs: large enough to be cheap, small enough to keep a window moving."""

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
    """Values that come one by one leave one by one: nobody can tell how long the next will take."""
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
    """The key of each value; None if there are none."""
    if key is None:
        return None
    return [key(value) for value in values] if callable(key) else [key] * len(values)


def then(done: asyncio.Future[_Done], make: Callable[[_Done], _Wanted]) -> asyncio.Future[_Wanted]:
    """A future that gives what `make` makes of another's result, and fails as it fails."""
    wanted: asyncio.Future[_Wanted] = done.get_loop().create_future()

    def hand_over(done: asyncio.Future[_Done]) -> None:
        if wanted.done():
            return
        if done.cancelled():
            wanted.cancel()
        elif (failure := done.exception()) is not None:
            wanted.set_exception(failure)
            wanted.exception()  # whoever does not await it hears of it from the client's `close`
        else:
            wanted.set_result(make(done.result()))

    done.add_done_callback(hand_over)
    return wanted
