"""Layouts of PRODUCE_DELAYED (0x30), CANCEL_DELAYED (0x31), PRODUCE_WITH_TTL (0x35) and of their replies.

    PRODUCE_DELAYED    topic s16, value b32, delay i64, [key b32, partition i32]    → RecordMetadata, id s16, time of delivery i64
    CANCEL_DELAYED     [topic s16], id s16                                          → done
    PRODUCE_WITH_TTL   topic s16, value b32, ttl i64, [key b32, partition i32]      → RecordMetadata

Delays and times to live are in ms, times in Unix ms. RecordMetadata is as for PRODUCE (see `produce.py`); the offset of a delayed message
is 0, since it has none yet. Only Headrace has key, partition, id, time of delivery and the layout of CANCEL_DELAYED.
"""

from __future__ import annotations

from headrace.wire.flymq.advanced_messages import CancelDelayed, Placed, ProduceDelayed, ProduceWithTtl, Scheduled
from headrace.wire.flymq.fields import B32, I32, I64, S16, U64, Field, Layout, Reader, Trailing
from headrace.wire.flymq.messages import AUTO


class CancelLayout:
    """The only text is the id."""

    def read(self, reader: Reader, /) -> CancelDelayed:
        first = S16.read(reader)
        return CancelDelayed(S16.read(reader), first) if reader.left else CancelDelayed(first)

    def write(self, value: CancelDelayed, /) -> bytes:
        return (S16.write(value.topic) if value.topic else b"") + S16.write(value.message)


_KEY: Field[bytes] = Trailing(B32, b"", always=True)
_PARTITION: Field[int] = Trailing(I32, AUTO, always=True)

PRODUCE_DELAYED = Layout(ProduceDelayed, topic=S16, value=B32, delay_ms=I64, key=_KEY, partition=_PARTITION)
CANCEL_DELAYED = CancelLayout()
PRODUCE_WITH_TTL = Layout(ProduceWithTtl, topic=S16, value=B32, ttl_ms=I64, key=_KEY, partition=_PARTITION)

PLACED = Layout(Placed, topic=S16, partition=I32, offset=U64, timestamp=I64, key_size=I32, value_size=I32)
SCHEDULED = Layout(
    Scheduled,
    topic=S16,
    partition=I32,
    offset=U64,
    timestamp=I64,
    key_size=I32,
    value_size=I32,
    message=Trailing(S16, "", always=True),
    deliver_at=Trailing(I64, 0, always=True),
)
