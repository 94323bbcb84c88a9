"""Layouts of the dead-letter requests (0x20–0x22) and of their replies.

    FETCH_DLQ    topic s16, max i32, [after s16, replayed bool]    → list of (id s16, data b32, error s16, attempts i32), list of details
    REPLAY_DLQ   topic s16, id s16 / offset u64                    → done
    PURGE_DLQ    topic s16                                         → done

A detail is key b32, partition i32, offset i64, first failure i64, last failure i64, replayed at i64, list of (name s16, value b32): fields
that the original's entry does not have. It follows the list of entries, where the original's clients ignore it.

Some clients replay by the offset in the dead-letter topic: eight bytes, which could also be an id of six bytes with its length.
"""

from __future__ import annotations

from typing import Final

from headrace.wire.flymq.advanced_messages import DlqDetail, DlqEntries, DlqEntry, FetchDlq, Header, PurgeDlq, ReplayDlq
from headrace.wire.flymq.fields import B32, BOOL, I32, I64, S16, U64, Layout, Reader, Repeated, Trailing

_OFFSET_BYTES: Final = 8
_SAME_LENGTH_ID: Final = b"\x00\x06"


class ReplayLayout:
    def read(self, reader: Reader, /) -> ReplayDlq:
        topic = S16.read(reader)
        if reader.left == _OFFSET_BYTES and not reader.payload.startswith(_SAME_LENGTH_ID, reader.at):
            return ReplayDlq(topic, f"0-{U64.read(reader)}")
        return ReplayDlq(topic, S16.read(reader))

    def write(self, value: ReplayDlq, /) -> bytes:
        return S16.write(value.topic) + S16.write(value.message)


FETCH_DLQ = Layout(FetchDlq, topic=S16, records_max=I32, after=Trailing(S16, "", always=True), replayed=Trailing(BOOL, False, always=True))
REPLAY_DLQ = ReplayLayout()
PURGE_DLQ = Layout(PurgeDlq, topic=S16)

_ENTRY = Layout(DlqEntry, id=S16, value=B32, error=S16, attempts=I32)
_DETAIL = Layout(
    DlqDetail,
    key=B32,
    partition=I32,
    offset=I64,
    first_failure=I64,
    last_failure=I64,
    replayed_at=I64,
    headers=Repeated(Layout(Header, name=S16, value=B32)),
)
_NO_DETAILS: list[DlqDetail] = []
DLQ_ENTRIES = Layout(DlqEntries, entries=Repeated(_ENTRY), details=Trailing(Repeated(_DETAIL), _NO_DETAILS, always=True))
