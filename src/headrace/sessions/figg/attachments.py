"""Attachments of one Figg connection and their delivery.

Each attachment has a position: the next record offset to send. A broker cursor pushes from that position while the peer reads its data.
Credit is returned only while few bytes are unsent, so a PONG or an ACK never waits behind a long backlog. A thousand live attachments may
spend their credit at once and exceed the output limit. An attachment is then parked: its cursor is closed, and a new one is opened at the
same position when the peer has caught up.

Attachments with a backlog take turns, one of all connections in each turn of the loop, so that a deep backlog does not delay other
attachments or connections. Those at the end of their topic need no turn: the broker delivers to them in slices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, cast

from headrace.broker import Batch, Bounds
from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.reading.cursor import Cursor, Delivered
from headrace.errors import BrokerError, LimitExceeded
from headrace.limits import KIB, OUTPUT_BUFFER_BYTES_MAX, OUTPUT_HIGH_WATER_BYTES, SUBSCRIPTIONS_PER_CONNECTION_MAX
from headrace.sessions.contract import Link
from headrace.sessions.turns import Turn, Turns
from headrace.wire.figg import encode

CREDIT_BYTES: Final = 128 * KIB
"""Bytes that a cursor may push before it waits for its turn. With twice as many, a turn of the loop takes up to 0.3 ms."""
PARTITION: Final = 0
"""Figg has no partitions: it uses the first one of each topic."""


class Attachment:
    """Delivery of one topic to one connection."""

    __slots__ = ("cursor", "is_waiting", "position", "spent_bytes", "topic")

    def __init__(self, topic: str, position: int) -> None:
        self.topic = topic
        self.position = position
        self.cursor: Cursor | None = None
        """None while parked."""
        self.spent_bytes = 0
        """Credit spent since the last turn."""
        self.is_waiting = False
        """Whether it waits for its turn."""


class Attachments:
    """Attachments of one connection, by topic. `failed` is called when a delivery fails."""

    def __init__(self, broker: Broker, link: Link, who: Principal, failed: Callable[[BrokerError], None], turns: Turns) -> None:
        self._broker, self._link, self._who, self._failed, self._turns = broker, link, who, failed, turns
        self._by_topic: dict[str, Attachment] = {}
        self._waiting: deque[Attachment] = deque()
        self._turn: Turn | None = None

    def attach(self, topic: str, offset: int | None) -> None:
        """Send ATTACHED, then deliver. Replaces an attachment to the same topic.

        An offset points to the next message, so it is the record offset to start from. An offset below the earliest record becomes the
        earliest one, and an offset beyond the end becomes the end. The reply names the offset used. Raises `UnknownTopic` and related
        errors.
        """
        bounds = self._broker.bounds(self._who, topic, PARTITION)
        if topic not in self._by_topic and len(self._by_topic) >= SUBSCRIPTIONS_PER_CONNECTION_MAX:
            raise LimitExceeded(f"a connection may attach to at most {SUBSCRIPTIONS_PER_CONNECTION_MAX} topics")
        self.detach(topic)
        attachment = Attachment(topic, bounds.end if offset is None else _within(bounds, offset))
        self._by_topic[topic] = attachment
        self._link.send(encode.attached(topic, attachment.position))
        if attachment.position == bounds.end:
            self._go_on(attachment)  # nothing to deliver now: a thousand of these need no turns
        else:
            self._wait_for_turn(attachment)

    def detach(self, topic: str) -> None:
        """Stop the delivery of the topic."""
        attachment = self._by_topic.pop(topic, None)
        if attachment is not None and attachment.cursor is not None:
            attachment.cursor.close()
            attachment.cursor = None  # each refers to the other

    def feed(self) -> None:
        """Continue after the peer has read its data."""
        if self._turn is None and self._waiting:
            self._turn = self._turns.take(self._take_turn)

    def close(self) -> None:
        """Stop all deliveries, and release the session."""
        self._failed = _ignore
        for topic in list(self._by_topic):
            self.detach(topic)
        self._waiting.clear()
        if self._turn is not None:
            self._turn.cancel()
            self._turn = None

    def _wait_for_turn(self, attachment: Attachment) -> None:
        if not attachment.is_waiting:
            attachment.is_waiting = True
            self._waiting.append(attachment)
            self.feed()

    def _take_turn(self) -> None:
        """Continue the next attachment, unless the peer has too much unread. `feed` is then called later."""
        self._turn = None
        if self._link.unsent_bytes > OUTPUT_HIGH_WATER_BYTES:
            return
        attachment = self._waiting.popleft()
        attachment.is_waiting = False
        if self._by_topic.get(attachment.topic) is attachment:
            self._go_on(attachment)
        self.feed()

    def _go_on(self, attachment: Attachment) -> None:
        if attachment.cursor is not None:
            spent, attachment.spent_bytes = attachment.spent_bytes, 0
            attachment.cursor.grant(spent)
            return
        attachment.spent_bytes = 0
        try:
            bounds = self._broker.bounds(self._who, attachment.topic, PARTITION)
            attachment.cursor = self._broker.cursor(
                self._who,
                attachment.topic,
                PARTITION,
                _within(bounds, attachment.position),
                partial(self._deliver, attachment),
                credit_bytes=CREDIT_BYTES,
                failed=self._failed,
            )
        except BrokerError as failure:
            self._failed(failure)

    def _deliver(self, attachment: Attachment, delivered: Delivered) -> None:
        if self._link.unsent_bytes > OUTPUT_BUFFER_BYTES_MAX:
            self._park(attachment, delivered[0].first_offset)
            return
        self._link.send(delivered.encoded("figg", partial(_encode, attachment.topic)))
        attachment.position = delivered[-1].next_offset
        attachment.spent_bytes += delivered.size_bytes
        if attachment.spent_bytes >= CREDIT_BYTES // 2:
            if attachment.cursor is not None and attachment.cursor.is_live and self._link.unsent_bytes <= OUTPUT_HIGH_WATER_BYTES:
                self._go_on(attachment)
            else:
                self._wait_for_turn(attachment)

    def _park(self, attachment: Attachment, position: int) -> None:
        assert attachment.cursor is not None, "only an open cursor delivers"
        attachment.cursor.close()
        attachment.cursor, attachment.position = None, position
        self._wait_for_turn(attachment)


def _ignore(failure: BrokerError) -> None:
    pass


def _within(bounds: Bounds, offset: int) -> int:
    return min(max(offset, bounds.first), bounds.end)


def _encode(topic: str, batches: list[Batch]) -> bytes:
    return b"".join([encode.data(topic, _following(batch), _values(batch)) for batch in batches])


def _following(batch: Batch) -> range | list[int]:
    """Return Figg's offsets: each points past its record."""
    offsets = batch.offsets()
    if isinstance(offsets, range):
        return range(offsets.start + 1, offsets.stop + 1)
    return [offset + 1 for offset in offsets]


def _values(batch: Batch) -> list[bytes]:
    """Return the values. Figg cannot express a tombstone, so it is sent as empty data."""
    values = batch.values()
    # `all` is three times as fast as a comprehension, and tombstones are rare.
    return cast(list[bytes], values) if all(values) else [value or b"" for value in values]
