"""Kinds of appends for engines that have no cheaper way than `append`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from headrace.engine.contract import Appended, AppendedEach, Write
from headrace.errors import BrokerError
from headrace.records import RecordBatch


def append_by_future(
    append: Callable[[Sequence[Write]], asyncio.Future[list[Appended]]],
    write: Write,
    done: Callable[[list[Appended] | BaseException], None],
) -> None:
    """Implement `Engine.append_then` by `append`."""

    def landed(staged: asyncio.Future[list[Appended]]) -> None:
        done(staged.exception() or staged.result())

    append([write]).add_done_callback(landed)


def append_by_partition(
    append: Callable[[Sequence[Write]], asyncio.Future[list[Appended]]],
    places: Sequence[tuple[str, int]],
    values: Sequence[bytes],
    keys: Sequence[bytes | None] | None,
) -> asyncio.Future[AppendedEach]:
    """Implement `Engine.append_each` by `append`."""
    by_place: dict[tuple[str, int], list[int]] = {}
    for index, place in enumerate(places):
        by_place.setdefault(place, []).append(index)
    answer: asyncio.Future[AppendedEach] = asyncio.get_running_loop().create_future()
    found = AppendedEach([0] * len(values), 0)
    waiting = set(by_place)

    def landed(place: tuple[str, int], staged: asyncio.Future[list[Appended]]) -> None:
        error = staged.exception()
        if error is None:
            (appended,) = staged.result()
            found.timestamp = max(found.timestamp, appended.timestamp)
            for offset, index in enumerate(by_place[place], appended.base_offset):
                found.offsets[index] = offset
        elif isinstance(error, BrokerError):
            found.failed.update(dict.fromkeys(by_place[place], error))
        elif not answer.done():
            answer.set_exception(error)
        settle(place)

    def settle(place: tuple[str, int]) -> None:
        waiting.discard(place)
        if not waiting and not answer.done():
            answer.set_result(found)

    for (topic, partition), indexes in by_place.items():
        picked = None if keys is None else [keys[index] for index in indexes]
        batch = RecordBatch([values[index] for index in indexes], picked if picked and any(picked) else None)
        try:
            staged = append([Write(topic, partition, batch)])
        except BrokerError as error:
            found.failed.update(dict.fromkeys(indexes, error))
            settle((topic, partition))
        else:
            staged.add_done_callback(partial(landed, (topic, partition)))
    return answer
