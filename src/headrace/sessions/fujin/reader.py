"""Reader side of a Fujin stream: pushes messages or answers fetches, and settles deliveries.

Each message goes to one reader of a group. Without auto commit a message has an id and is redelivered until it is acknowledged. After a
few attempts it goes to the topic's dead letters. The id identifies the record, not the delivery:

    0           4          12           20
    +-----------+----------+------------+- - - - - - +
    | partition | offset   | timestamp  |  topic     |      only if the reader has several topics
    | u32       | u64      | u64        |            |
    +-----------+----------+------------+- - - - - - +

An id from a lost connection identifies the same record on the next one. It is accepted if the record was delivered there again, and is
an error otherwise. The timestamp distinguishes a topic from a deleted one of the same name.

With auto commit a message counts as read when the peer's transport has acknowledged it. Otherwise it is delivered again. Messages are
then taken in chunks of columns, because none is acknowledged on its own.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from headrace import limits
from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.groups.members import Chunk, Delivery, Member, SettlementPolicy
from headrace.errors import BrokerError
from headrace.sessions.contract import StreamedLink
from headrace.sessions.fujin.errors import INVALID_READER_TYPE, NO_FETCH_COUNT, NOT_SUPPORTED, READER_NOT_FOUND, UNKNOWN_MESSAGE, text
from headrace.sessions.fujin.settings import FujinSettings, ReaderConnector
from headrace.sessions.request_ids import log_refused
from headrace.sessions.session import begin
from headrace.wire.fujin import ConnectReader, Fetch, ReaderKind, Reply, Request, Settle, encode

_ID: Final = struct.Struct(">IQQ")
assert _ID.size == 20, "the drawing says 20"
TAKE_RECORDS: Final = 2_000
TAKE_BYTES: Final = 128 * limits.KIB
"""Bytes pushed at once: enough to be efficient, and few enough to keep the unsent bytes near the high-water mark."""
FETCH_BYTES: Final = 1 * limits.MIB
UNCONFIRMED_MAX: Final = 65_536
"""Most pushed messages with auto commit that the transport has not acknowledged."""
_UNREAD_TIMEOUT_MS: Final = 3_600_000
"""With auto commit there are no acknowledgements: only a lost connection returns a message."""
_LAST_WORDS_SECONDS: Final = 0.25
"""Time a disconnecting reader waits for the acknowledgement of its last messages. Then they are returned to the group."""
_LAST_LOOK_SECONDS: Final = 0.01
"""Interval of that wait."""
_CONFIRM_SECONDS: Final = 0.05
"""Interval for checking whether messages have arrived while others are under way. Short, because until then they use up the reader's
credit. When everything has arrived, the link says so at once."""
_DRAINING_SECONDS: Final = 0.05


class Source:
    """One topic of a reader."""

    def __init__(self, topic: str, suffix: bytes, member: Member) -> None:
        self.topic, self.suffix, self.member = topic, suffix, member

    def id_of(self, delivery: Delivery) -> bytes:
        return _ID.pack(delivery.partition, delivery.offset, delivery.timestamp) + self.suffix


class Reader:
    """Reader of one stream. `settled` is called when no FETCH waits, `failed` when the reader cannot continue."""

    def __init__(
        self,
        broker: Broker,
        link: StreamedLink,
        who: Principal,
        settings: FujinSettings,
        request: ConnectReader,
        *,
        settled: Callable[[], None],
        failed: Callable[[str], None],
    ) -> None:
        self._broker, self._link, self._who, self._settings = broker, link, who, settings
        self._kind, self._auto_commit, self._name = request.kind, request.auto_commit, request.name
        self._loop = asyncio.get_running_loop()
        self._settled, self.failed = settled, failed
        self._sources: list[Source] = []
        self._turn = 0
        self._unsettled: dict[bytes, tuple[Source, int]] = {}
        """By message id. The oldest are dropped when there are many: they were delivered to other readers since, and an ACK of them fails.
        """
        self._unconfirmed: deque[tuple[int, Callable[[], object]]] = deque()
        """With auto commit: the number of bytes sent up to some messages, and the call to make when they have arrived."""
        self._sent_bytes = 0
        self._confirm_timer: asyncio.TimerHandle | None = None
        self._fetches: deque[Fetch] = deque()
        self._paused_for_fetches = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_fetching = False
        self._fetching: asyncio.Task[None] | None = None
        """Answers the FETCHes after one that had to wait."""
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_stopped = False

    @property
    def is_settled(self) -> bool:
        """Whether no FETCH waits for its reply."""
        return not self._is_fetching

    async def connect(self) -> str | None:
        """Open the sources. Return an error text, or None."""
        connector = self._settings.connectors.reader(self._name)
        if connector is None:
            return READER_NOT_FOUND
        try:
            for topic in connector.topics:
                await self._broker.ensure_topic(self._who, topic)
            for topic in connector.topics:
                suffix = topic.encode() if len(connector.topics) > 1 else b""
                self._sources.append(Source(topic, suffix, self._join(connector, topic)))
        except BrokerError as error:
            self.lost()
            return self._text(error)
        return None

    def _text(self, error: BrokerError) -> str:
        self._broker.meters.refuse("fujin", error.code)
        return text(error, READER_NOT_FOUND)

    def _refuse(self, reply: Reply, cid: bytes, error: str) -> None:
        log_refused("fujin", self._link.peer, error, [cid])
        self._link.send(encode.answered(reply, cid, error))

    def start(self) -> None:
        """Start pushing, if the client wants that. The client knows that it is connected."""
        if self._kind is ReaderKind.PUSH:
            for source in self._sources:
                self._keep(self._loop.create_task(self._push(source)))

    def handle(self, message: Fetch | Settle) -> None:
        if isinstance(message, Settle):
            self._settle(message)
        elif self._kind is not ReaderKind.PULL:
            self._refuse(Reply.FETCH, message.cid, INVALID_READER_TYPE)
        elif message.count == 0:
            self._refuse(Reply.FETCH, message.cid, NO_FETCH_COUNT)
        else:
            self._fetches.append(message)
            if len(self._fetches) > limits.FUJIN_FETCHES_MAX and not self._paused_for_fetches:
                self._paused_for_fetches = True
                self._link.pause_reading()
            if not self._is_fetching:
                self._is_fetching = True
                self._fetching = self._keep(begin(self._fetch_all(), self._loop))

    def drained(self) -> None:
        self._confirm()
        self._writable.set()

    def stop(self) -> None:
        """Deliver nothing more. Deliveries may still be settled, and a waiting FETCH gets an empty reply."""
        self._is_stopped = True
        for task in self._tasks:
            if task is not self._fetching:
                task.cancel()

    async def disconnect(self) -> None:
        """Stop. The group's progress is durable when this returns."""
        self.stop()
        deadline = self._loop.time() + _LAST_WORDS_SECONDS
        while self._unconfirmed and self._loop.time() < deadline:
            await asyncio.sleep(_LAST_LOOK_SECONDS)
            self._confirm()
        sources, self._sources = self._sources, []
        for source in sources:
            await source.member.close()

    def lost(self) -> None:
        """Return the deliveries in flight to the group."""
        self._is_stopped = True
        self._confirm()
        if self._confirm_timer is not None:
            self._confirm_timer.cancel()
        for task in self._tasks:
            task.cancel()
        sources, self._sources = self._sources, []
        for source in sources:
            source.member.close()

    # Sources.

    def _join(self, connector: ReaderConnector, topic: str) -> Member:
        settings = self._settings
        policy = SettlementPolicy(
            ack_timeout_ms=settings.ack_timeout_ms,
            backoff_ms=settings.backoff_ms,
            backoff_max_ms=settings.backoff_max_ms,
            attempts_max=settings.attempts_max,
        )
        if self._auto_commit:
            policy = SettlementPolicy(
                ack_timeout_ms=_UNREAD_TIMEOUT_MS,
                attempts_max=0,
                in_flight_max=UNCONFIRMED_MAX,
                dead_letters=False,
                chunks=True,
            )
        return self._broker.join(
            self._who,
            connector.group,
            topic,
            policy=policy,
            mode=connector.mode,
            default_mode="shared",
            start=connector.start,
            address=self._link.peer,
        )

    def _keep(self, task: asyncio.Task[None] | None) -> asyncio.Task[None] | None:
        """Cancel the task when the reader ends."""
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return task

    # Delivering.

    async def _push(self, source: Source) -> None:
        push = self._push_chunk if self._auto_commit else self._push_messages
        try:
            while not self._is_stopped:
                await self._room()
                if await push(source):
                    # Records that arrive meanwhile go into the next chunk.
                    await self._sent()
                else:
                    # A draining broker returns nothing at once. Do not call it in a busy loop.
                    await asyncio.sleep(_DRAINING_SECONDS)
        except BrokerError as error:
            self.failed(f"{error.code}: {error}")

    async def _push_messages(self, source: Source) -> bool:
        taken = await source.member.take(TAKE_RECORDS, TAKE_BYTES, wait_ms=limits.FETCH_WAIT_MS_MAX)
        if taken:
            self._link.send(encode.messages(self._deliver(source, taken), [delivery.value or b"" for delivery in taken]))
        return bool(taken)

    async def _push_chunk(self, source: Source) -> bool:
        member = source.member
        chunk = await member.take_chunk(UNCONFIRMED_MAX, TAKE_BYTES, wait_ms=limits.FETCH_WAIT_MS_MAX)
        if chunk is not None:
            self._send_confirmed(encode.messages(None, [value or b"" for value in chunk.values]), partial(member.ack, chunk.ids))
        return chunk is not None

    async def _room(self) -> None:
        """Wait until the peer has read enough of its output."""
        while self._link.unsent_bytes > limits.OUTPUT_HIGH_WATER_BYTES:
            self._writable.clear()
            await self._writable.wait()

    async def _sent(self) -> None:
        """Wait until the connection had its turn to send."""
        sent: asyncio.Future[None] = self._loop.create_future()
        self._link.when_sent(lambda: None if sent.done() else sent.set_result(None))
        await sent

    async def _fetch_all(self) -> None:
        """Answer the FETCHes one by one, in the order of the requests."""
        try:
            while self._fetches:
                await self._room()
                await self._fetch(self._fetches.popleft())
                if self._paused_for_fetches and len(self._fetches) <= limits.FUJIN_FETCHES_MAX // 2:
                    self._paused_for_fetches = False
                    self._link.resume_reading()
        finally:
            has_waited, self._fetching, self._is_fetching = self._fetching is not None, None, False
        if has_waited:
            self._settled()

    async def _fetch(self, message: Fetch) -> None:
        count = min(message.count, limits.FUJIN_FETCH_RECORDS_MAX)
        try:
            found = None if self._is_stopped else await self._take(count)
        except BrokerError as error:
            self._refuse(Reply.FETCH, message.cid, self._text(error))
            return
        if found is None:
            self._link.send(encode.fetched(message.cid, None if self._auto_commit else [], []))
            return
        source, taken = found
        if isinstance(taken, Chunk):
            values = [value or b"" for value in taken.values]
            self._send_confirmed(encode.fetched(message.cid, None, values), partial(source.member.ack, taken.ids))
        else:
            values = [delivery.value or b"" for delivery in taken]
            self._link.send(encode.fetched(message.cid, self._deliver(source, taken), values))

    async def _take(self, count: int) -> tuple[Source, list[Delivery] | Chunk] | None:
        """Take from the first source that has messages, starting with another source each time. Wait a little if none has."""
        self._turn = (self._turn + 1) % len(self._sources)
        sources = self._sources[self._turn :] + self._sources[: self._turn]
        source_wait_ms = self._settings.fetch_wait_ms // len(sources)
        for wait_ms in (0, source_wait_ms):
            for source in sources:
                if wait_ms == 0 and len(sources) == 1:
                    continue
                take = source.member.take_chunk if self._auto_commit else source.member.take
                if taken := await take(count, FETCH_BYTES, wait_ms=wait_ms):
                    return source, taken
        return None

    def _deliver(self, source: Source, taken: Sequence[Delivery]) -> list[bytes]:
        """Return the ids of the messages and remember them."""
        ids = [source.id_of(delivery) for delivery in taken]
        for id, delivery in zip(ids, taken, strict=True):
            self._unsettled.pop(id, None)
            self._unsettled[id] = source, delivery.id
        for id in list(self._unsettled)[: max(0, len(self._unsettled) - 2 * limits.IN_FLIGHT_MAX * len(self._sources))]:
            del self._unsettled[id]
        return ids

    def _send_confirmed(self, frames: bytes, arrived: Callable[[], object]) -> None:
        """Send the frames, and call `arrived` when the peer has acknowledged all of them."""
        self._link.send(frames)
        self._sent_bytes += len(frames)
        self._unconfirmed.append((self._sent_bytes, arrived))
        self._confirm_later()

    def _confirm(self) -> None:
        """Confirm what the peer has received. Only messages count, so an unsent reply delays the confirmation and never advances it."""
        arrived = self._sent_bytes - self._link.unsent_bytes
        while self._unconfirmed and self._unconfirmed[0][0] <= arrived:
            self._unconfirmed.popleft()[1]()
        if self._unconfirmed:
            self._confirm_later()

    def _confirm_later(self) -> None:
        if self._is_stopped:
            return
        self._link.when_acknowledged(self._confirm)
        if self._confirm_timer is None:
            self._confirm_timer = self._loop.call_later(_CONFIRM_SECONDS, self._confirm_again)

    def _confirm_again(self) -> None:
        self._confirm_timer = None
        self._confirm()

    # Settling.

    def _settle(self, message: Settle) -> None:
        reply = Reply.ACK if message.request is Request.ACK else Reply.NACK
        if self._auto_commit:
            self._refuse(reply, message.cid, NOT_SUPPORTED)
            return
        errors: list[str | None] = [UNKNOWN_MESSAGE] * len(message.ids)
        for source in self._sources:
            known = [(index, self._unsettled[id][1]) for index, id in enumerate(message.ids) if self._is_from(source, id)]
            settle = source.member.ack if message.request is Request.ACK else source.member.nack
            for (index, _), done in zip(known, settle([delivery for _, delivery in known]), strict=True):
                if done:
                    errors[index] = None
                if done is False or message.request is Request.ACK:
                    self._unsettled.pop(message.ids[index], None)
        self._link.send(encode.settled(reply, message.cid, message.ids, errors))

    def _is_from(self, source: Source, id: bytes) -> bool:
        found = self._unsettled.get(id)
        return found is not None and found[0] is source
