"""Ledger of a crash test: which values clients sent, which were acknowledged, and what a log may therefore hold.

A value identifies itself: `client connection sequence checksum filler`. The checksum covers the topic too, so that a value in the
wrong topic is found. A client that resends a value, because it does not know whether the first copy was stored, does so on a later
connection: two copies with one connection number were made by the broker.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise


class BrokenPromise(AssertionError):
    """The content of the log contradicts what its clients know."""


@dataclass(frozen=True, slots=True, order=True)
class Sent:
    """One copy of one value, ordered as its client sent it."""

    connection: int
    sequence: int


def compose(topic: str, client: int, sent: Sent, filler: bytes) -> bytes:
    front = b"%d %d %d " % (client, sent.connection, sent.sequence)
    return front + b"%08x " % zlib.crc32(topic.encode() + front + filler) + filler


def decompose(topic: str, value: bytes) -> tuple[int, Sent]:
    parts = value.split(b" ", 4)
    try:
        client, connection, sequence, checksum = int(parts[0]), int(parts[1]), int(parts[2]), int(parts[3], 16)
        sent, filler = Sent(connection, sequence), parts[4]
    except (ValueError, IndexError):
        raise BrokenPromise(f"{topic}: {value[:60]!r} was never sent") from None
    if checksum != zlib.crc32(topic.encode() + b"%d %d %d " % (client, connection, sequence) + filler):
        raise BrokenPromise(f"{topic}: {value[:60]!r} is not what client {client} sent")
    return client, sent


@dataclass
class Ledger:
    """One ledger for all clients. `note_sent` comes before sending, `note_acked` after receiving the acknowledgement."""

    topics: Sequence[str]
    sent: dict[tuple[int, str], set[Sent]] = field(default_factory=dict)
    acked: dict[tuple[int, str], set[int]] = field(default_factory=dict)
    seen: dict[str, list[bytes]] = field(default_factory=dict)
    """Values that an earlier read of each topic returned: a later read may add values, never change them."""
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def note_sent(self, client: int, topic: str, sent: Sent) -> None:
        with self._mutex:
            self.sent.setdefault((client, topic), set()).add(sent)

    def note_acked(self, client: int, topic: str, sequence: int) -> None:
        with self._mutex:
            self.acked.setdefault((client, topic), set()).add(sequence)

    @property
    def acked_count(self) -> int:
        with self._mutex:
            return sum(map(len, self.acked.values()))

    def check(self, topic: str, values: list[bytes]) -> None:
        """Raise `BrokenPromise` unless `values` is a valid content of the topic."""
        before = self.seen.get(topic, [])
        if values[: len(before)] != before:
            index = next((i for i, value in enumerate(before) if i >= len(values) or values[i] != value), 0)
            raise BrokenPromise(f"{topic}: a reader saw {before[index][:40]!r} at {index} and now it is gone")
        self.seen[topic] = values
        found: dict[int, list[Sent]] = {}
        for value in values:
            client, sent = decompose(topic, value)
            found.setdefault(client, []).append(sent)
        for client in found.keys() | {client for client, known in self.acked if known == topic}:
            self._check_client(topic, client, found.get(client, []))

    def _check_client(self, topic: str, client: int, found: list[Sent]) -> None:
        with self._mutex:
            sent, acked = set(self.sent.get((client, topic), ())), set(self.acked.get((client, topic), ()))
        where = f"{topic}, client {client}"
        if not sent.issuperset(found):
            raise BrokenPromise(f"{where}: holds {min(set(found) - sent)}, which was never sent")
        lost = acked - {copy.sequence for copy in found}
        if lost:
            raise BrokenPromise(f"{where}: {len(lost)} acknowledged values are lost, the first is {min(lost)}")
        for earlier, later in pairwise(found):
            if earlier == later:
                raise BrokenPromise(f"{where}: {later} was kept twice")
            if earlier > later:
                raise BrokenPromise(f"{where}: {later} stands behind {earlier}")
