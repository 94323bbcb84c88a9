"""What one Figg connection is attached to, and how it is fed.

Every attachment knows one number, the next record offset to send. While the peer takes its data, a broker cursor pushes from there;
credit is given back only while little waits unsent, so a PONG or an ACK never stands behind a long backlog. Should more than the
output limit pile up all the same (a thousand live attachments may each spend their credit at once), an attachment is parked: its
cursor is closed, and a new one opened at the same number when the peer has caught up.

Attachments of all connections take turns, one a turn of the loop: no backlog, however deep, holds up the other attachments or the other
connections.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, cast

from headrace.broker import Batch, Bounds
from headrace.broker.access import Principal
from headrace.broker.batches import size_bytes
from headrace.broker.broker import Broker
from headrace.broker.cursor import Cursor
from headrace.errors import BrokerError, LimitExceeded
from headrace.limits import KIB, OUTPUT_BUFFER_BYTES_MAX, OUTPUT_HIGH_WATER_BYTES, SUBSCRIPTIONS_PER_CONNECTION_MAX
from headrace.sessions.contract import Link
from headrace.sessions.turns import Turn, Turns
from headrace.wire.figg import encode

CREDIT_BYTES: Final = 256 * KIB
"""What a cursor may push before it has to wait for its turn."""
PARTITION: Final = 0
"""Figg knows no partitions: it lives in the first one of each topic."""


class Attachment:
    """One topic's delivery to one connection."""

    __slots__ = ("cursor", "is_waiting", "position", "spent_bytes", "topic")

    def __init__(self, topic: str, position: int) -> None:
        self.topic = topic
        self.position = position
        self.cursor: Cursor | None = None
        """None while parked."""
        self.spent_bytes = 0
        """Of its credit, since its last turn."""
        self.is_waiting = False
        """For its turn."""


class Attachments:
    """Of one connection, by topic. `failed` is told when a delivery cannot go on."""

    def __init__(self, broker: Broker, link: Link, who: Principal, failed: Callable[[BrokerError], None], turns: Turns) -> None:
        self._broker, self._link, self._who, self._failed, self._turns = broker, link, who, failed, turns
        self._by_topic: dict[str, Attachment] = {}
        self._waiting: deque[Attachment] = deque()
        self._turn: Turn | None = None

    def attach(self, topic: str, offset: int | None) -> None:
        """Answer with ATTACHED, then deliver; replaces an attachment to the same topic.

        An offset points to the next message, so it is the record offset to start from. One that retention has overtaken becomes
        the oldest there is, one beyond the end becomes the end: the answer says which. Raises `UnknownTopic` and its kin.
        """
        bounds = self._broker.bounds(self._who, topic, PARTITION)
        if topic not in self._by_topic and len(self._by_topic) >= SUBSCRIPTIONS_PER_CONNECTION_MAX:
            raise LimitExceeded(f"one connection may attach to {SUBSCRIPTIONS_PER_CONNECTION_MAX} topics")
        self.detach(topic)
        attachment = Attachment(topic, bounds.end if offset is None else _within(bounds, offset))
        self._by_topic[topic] = attachment
        self._link.send(encode.attached(topic, attachment.position))
        self._wait_for_turn(attachment)

    def detach(self, topic: str) -> None:
        """Nothing of that topic is sent after this."""
        attachment = self._by_topic.pop(topic, None)
        if attachment is not None and attachment.cursor is not None:
            attachment.cursor.close()

    def feed(self) -> None:
        """The peer has taken what waited for it."""
        if self._turn is None and self._waiting:
            self._turn = self._turns.take(self._take_turn)

    def close(self) -> None:
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
        """Let the next attachment go on, unless the peer has enough to take; then `feed` comes when it has less."""
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
                lambda batches: self._deliver(attachment, batches),
                credit_bytes=CREDIT_BYTES,
                failed=self._failed,
            )
        except BrokerError as failure:
            self._failed(failure)

    def _deliver(self, attachment: Attachment, batches: list[Batch]) -> None:
        if self._link.unsent_bytes > OUTPUT_BUFFER_BYTES_MAX:
            self._park(attachment, batches[0].first_offset)
            return
        topic = attachment.topic
        self._link.send(b"".join([encode.data(topic, _following(batch), _values(batch)) for batch in batches]))
        attachment.position = batches[-1].next_offset
        attachment.spent_bytes += sum(map(size_bytes, batches))
        if attachment.spent_bytes >= CREDIT_BYTES // 2:
            self._wait_for_turn(attachment)

    def _park(self, attachment: Attachment, position: int) -> None:
        assert attachment.cursor is not None, "only an open cursor delivers"
        attachment.cursor.close()
        attachment.cursor, attachment.position = None, position
        self._wait_for_turn(attachment)


def _within(bounds: Bounds, offset: int) -> int:
    return min(max(offset, bounds.first), bounds.end)


def _following(batch: Batch) -> range | list[int]:
    """Figg's offsets: each points past its record."""
    offsets = batch.offsets()
    if isinstance(offsets, range):
        return range(offsets.start + 1, offsets.stop + 1)
    return [offset + 1 for offset in offsets]


def _values(batch: Batch) -> list[bytes]:
    """Figg has no way to say "deleted": a tombstone is sent as empty data."""
    values = batch.values()
    # `all` looks at a column three times as fast as a line of Python does, and almost always there is nothing to replace.
    return cast(list[bytes], values) if all(values) else [value or b"" for value in values]
