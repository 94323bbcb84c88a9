"""Clients that publish continuously, reconnect after the broker is killed, and keep the ledger."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Sequence

from tests.crash.ledger import Ledger, Sent, compose
from tests.crash.peer import Numbered, Peer

WINDOW = 400
"""Unacknowledged values of a client before it waits."""


class Board:
    """Current address of the broker. Clients wait here while it is down."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._address: tuple[str, int] | None = None
        self.quic = ("", 0)
        self._life = 0
        self._over = False

    def open(self, address: tuple[str, int], quic: tuple[str, int]) -> None:
        with self._changed:
            self._address, self.quic, self._life = address, quic, self._life + 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._address = None

    def end(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def next_life(self, after: int) -> tuple[tuple[str, int], int] | None:
        """Return (address, number) of a broker started after `after`; None when there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or (self._address is not None and self._life > after))
            return None if self._over or self._address is None else (self._address, self._life)


class Publisher(threading.Thread):
    """One client. A `patient` one resends unacknowledged values; another one drops them, and their outcome stays unknown."""

    def __init__(self, number: int, protocol: type[Peer], board: Board, ledger: Ledger, *, patient: bool, seed: int) -> None:
        super().__init__(name=f"client {number}", daemon=True)
        self.protocol, self.number = protocol.NAME, number
        self._protocol = protocol
        self._board, self._ledger, self._patient = board, ledger, patient
        self._rng = random.Random(f"{seed} client {number}")
        self._sequence = 0
        self._unsure: deque[tuple[int, str, bytes]] = deque()
        """(sequence, topic, filler) of unacknowledged values, oldest first."""

    def run(self) -> None:
        connection = life = 0
        while (found := self._board.next_life(life)) is not None:
            address, life = found
            connection += 1
            try:
                with self._protocol(self._board.quic if self._protocol.IS_QUIC else address) as peer:
                    self._publish(peer, connection)
            except OSError:
                continue  # the broker was killed: unacknowledged values stay unknown until the next start

    def _publish(self, peer: Peer, connection: int) -> None:
        again = list(self._unsure) if self._patient else []
        self._unsure.clear()
        self._send(peer, connection, again)
        while True:
            self._send(peer, connection, [self._compose() for _ in range(self._rng.choice((1, 3, 20, 150)))])
            while len(self._unsure) > (WINDOW if self._rng.random() < 0.7 else 0):
                self._settle(peer.acknowledged())

    def _compose(self) -> tuple[int, str, bytes]:
        size = self._rng.choice((0, 10, 100, 100, 100, 1000)) if self._rng.random() < 0.995 else 100_000
        self._sequence += 1
        return self._sequence, self._rng.choice(self._ledger.topics), self._rng.randbytes(size)

    def _send(self, peer: Peer, connection: int, values: Sequence[tuple[int, str, bytes]]) -> None:
        numbered: list[Numbered] = []
        for sequence, topic, filler in values:
            sent = Sent(connection, sequence)
            self._unsure.append((sequence, topic, filler))
            self._ledger.note_sent(self.number, topic, sent)
            numbered.append((topic, sequence, compose(topic, self.number, sent, filler)))
        peer.publish(numbered)

    def _settle(self, acknowledged: int) -> None:
        while self._unsure and self._unsure[0][0] <= acknowledged:
            sequence, topic, _ = self._unsure.popleft()
            self._ledger.note_acked(self.number, topic, sequence)
