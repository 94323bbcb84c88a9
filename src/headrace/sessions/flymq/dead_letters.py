"""Handlers of FETCH_DLQ, REPLAY_DLQ and PURGE_DLQ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from headrace.broker import Broker, DeadLetterEntry, Principal
from headrace.limits import FLYMQ_FETCH_BYTES_MAX
from headrace.wire.flymq.advanced_messages import NOWHERE, DlqDetail, DlqEntries, DlqEntry, FetchDlq, Header, PurgeDlq, ReplayDlq
from headrace.wire.flymq.messages import Done, Reply

ENTRIES_DEFAULT: Final = 10
"""Default number of letters."""
_ENTRIES_MAX: Final = 10_000


class DeadLetterHandlers:
    """Dead letters of a topic. `who` returns the current principal."""

    def __init__(self, broker: Broker, who: Callable[[], Principal]) -> None:
        self._broker = broker
        self._who = who

    async def fetch(self, request: FetchDlq) -> Reply:
        found = await self._broker.dead_letters(
            self._who(),
            request.topic,
            records_max=min(request.records_max, _ENTRIES_MAX) if request.records_max > 0 else ENTRIES_DEFAULT,
            bytes_max=FLYMQ_FETCH_BYTES_MAX,
            after=request.after,
            replayed=request.replayed,
        )
        return DlqEntries([_entry(one) for one in found], [_detail(one) for one in found])

    async def replay(self, request: ReplayDlq) -> Reply:
        replayed = await self._broker.replay(self._who(), request.topic, [request.message])
        ((partition, offset),) = replayed.placements.values()
        return Done(True, f"replayed to partition {partition}, offset {offset}")

    async def purge(self, request: PurgeDlq) -> Reply:
        count = await self._broker.purge_dead_letters(self._who(), request.topic)
        return Done(True, f"purged {count}")


def _entry(one: DeadLetterEntry) -> DlqEntry:
    return DlqEntry(one.id, one.value or b"", f"{one.reason}: {one.error}" if one.error else one.reason, one.attempts)


def _detail(one: DeadLetterEntry) -> DlqDetail:
    return DlqDetail(
        one.key or b"",
        NOWHERE if one.source_partition is None else one.source_partition,
        NOWHERE if one.source_offset is None else one.source_offset,
        one.first_failure,
        one.last_failure,
        NOWHERE if one.replayed_at is None else one.replayed_at,
        [Header(name, value) for name, value in one.headers],
    )
