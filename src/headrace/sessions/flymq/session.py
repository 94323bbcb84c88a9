"""Session of one FlyMQ connection.

Replies leave in the order of the requests. A PRODUCE is staged in the call that receives it and answered when the record is as durable as
its topic requires. Many may be in flight, up to a window of bytes. PRODUCE_WITH_TTL, PRODUCE_DELAYED, COMMIT and the requests of a
transaction work the same way. Every other request waits for the ones before it, so a client reads its own writes. A peer that does not
read its replies gets no further ones.

The dialect is the listener's until a request shows that the client is one of the original. From that request on it is the original's.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, TypeAlias

from headrace.broker import Broker, Principal, SettlementPolicy, settled
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.errors import BrokerError, InvalidRequest, NotAuthorized, NotCoordinator, UnknownTopic, WireError
from headrace.limits import FLYMQ_LOGIN_INFLATED_BYTES_MAX, FLYMQ_LOOP_INFLATED_BYTES_MAX, IN_FLIGHT_BYTES_MAX
from headrace.sessions.contract import Login, WatchedLink
from headrace.sessions.flymq.access import FlyMqAccess
from headrace.sessions.flymq.cluster import Node
from headrace.sessions.flymq.delayed import StagedReplies, batch_of, stage_commits, stage_delayed
from headrace.sessions.flymq.errors import error_reply, not_understood
from headrace.sessions.flymq.handlers import Handler, Handlers
from headrace.sessions.flymq.members import SHARED
from headrace.sessions.flymq.staging import Staged, StagedMany, StagedRecord, failed, stage, stage_many
from headrace.sessions.flymq.transactions import Committing, WholeCommitting
from headrace.sessions.session import BaseSession
from headrace.sessions.turns import Turns
from headrace.wire.flymq import (
    Dialect,
    RequestDecoder,
    answer_bytes,
    encode_failure,
    encode_received,
    encode_reply,
    encode_request,
    opcode_of,
    speaks_sdk,
)
from headrace.wire.flymq.access_messages import AccessRequest, Auth
from headrace.wire.flymq.advanced_messages import (
    DelayedBatch,
    ProduceDelayed,
    ProduceWithTtl,
    TxnBegin,
    TxnBeginBatch,
    TxnCommit,
    TxnProduceBatch,
    TxnWholeBatch,
)
from headrace.wire.flymq.framing import inflate
from headrace.wire.flymq.messages import (
    AUTO,
    Broken,
    ClusterMetadata,
    Commit,
    CommitBatch,
    Consume,
    Failure,
    Fetch,
    Malformed,
    Packed,
    ProduceBatch,
    ProduceMany,
    Reply,
    Request,
    RequestEvent,
    UnknownOpcode,
)


class _Pause(Enum):
    """The decoder stopped because it has decompressed enough. It continues when the earlier requests are done."""

    UNPACKING = "unpacking"


Step: TypeAlias = RequestEvent | _Pause


@dataclass(frozen=True, slots=True)
class FlyMqSettings:
    """Settings of a listener for its FlyMQ connections."""

    dialect: Dialect = Dialect.SPEC
    node: Node = Node()
    in_flight_bytes_max: int = IN_FLIGHT_BYTES_MAX
    shared: SettlementPolicy = SHARED
    """Settlement by members of shared groups."""


_DEFAULTS: Final = FlyMqSettings()


class FlyMqSession(BaseSession[Step]):
    """State of one connection."""

    def __init__(
        self,
        link: WatchedLink,
        broker: Broker,
        who: Principal,
        settings: FlyMqSettings = _DEFAULTS,
        access: FlyMqAccess | None = None,
        turns: Turns | None = None,
    ) -> None:
        """Without `access` there are no users and no logins."""
        super().__init__(link, in_flight_bytes_max=settings.in_flight_bytes_max)
        self._turns = Turns() if turns is None else turns
        self._watched_link = link
        self._broker = broker
        self._who = who
        self._handlers = Handlers(broker, who, settings.node, self._turns, self._is_over, link.peer, settings.shared)
        self._access = access
        self._dialect = self._first_dialect = settings.dialect
        self._auth: Auth | None = None
        """The last login, while the connection may be handed over."""
        self._decoder = self._requests_decoder = RequestDecoder(self._inflated_bytes_max)

    @property
    def _inflated_bytes_max(self) -> int:
        return FLYMQ_LOGIN_INFLATED_BYTES_MAX if self._needs_login() else FLYMQ_LOOP_INFLATED_BYTES_MAX

    def _needs_login(self) -> bool:
        return self._access is not None and self._access.needs_login

    # Calls from the connection.

    def receive(self, data: bytes) -> None:
        if self._ending is None:
            self._take(self._decode(data))

    def lost(self) -> None:
        self._handlers.end()
        super().lost()

    def _is_over(self) -> bool:
        """Return whether the broker drains or the peer has left. A connection that is not read does not notice that the peer has left."""
        return self._ending is not None or self._watched_link.has_peer_left

    # Order.

    def _decode(self, data: bytes) -> list[Step]:
        events: list[Step] = [*self._requests_decoder.feed(data)]
        if self._requests_decoder.more:
            events.append(_Pause.UNPACKING)
        return events

    def _serves(self, message: Step) -> bool:
        if isinstance(message, (Consume, Fetch)) and self._answers_now(message):
            return True
        match message:
            case ProduceBatch():
                self._work_left -= 1
                if not self._publishes(message):
                    self._start(self._publish_to_new_topic(message))
            case ProduceMany():
                self._work_left -= 1
                many = stage_many(self._broker, self._who, message)
                if many is not None:
                    self._queue(many)
                else:
                    self._inbox.extendleft(reversed(message.batches()))
            case ProduceWithTtl():
                partitions = None if message.partition == AUTO else [message.partition]
                keys: list[bytes | None] | None = [message.key] if message.key else None
                return self._serves(ProduceBatch(message.topic, [message.value], keys, partitions, [message.ttl_ms]))
            case CommitBatch() | DelayedBatch():
                self._work_left -= 1
                return self._stages_all(message)
            case ProduceDelayed() | Commit(transaction=""):
                return self._serves(batch_of(message))
            case Packed():
                self._start(self._unpack(message))
            case TxnWholeBatch() | TxnBeginBatch():
                if not self._is_writable():
                    return False
                self._work_left -= 1
                return self._stages_transactions(message)
            case TxnProduceBatch() | TxnBegin() | TxnCommit():
                if not self._is_writable():
                    return False
                self._work_left -= 1
                try:
                    staged = self._handlers.transactions.stage(message, self._dialect)
                except NotCoordinator as error:
                    return self._passes_on(message, error)
                if staged is not None:
                    self._queue(staged)
                else:
                    assert isinstance(message, TxnProduceBatch)
                    self._start(self._produce_to_new_topic(message))
            case _ if self._owed:
                return False
            case Fetch() if not message.pattern:
                self._start(self._answer(message, self._turns.fetches))
            case _ if not self._is_writable():
                return False
            case _Pause.UNPACKING:
                # Behind it in the inbox is only what the decoder returned after it.
                self._inbox.extend(self._decode(b""))
                self._work_left = 0
            case Broken():
                if message.answer is not None:
                    self._reply(encode_failure(Failure(message.answer), self._dialect))
                self._inbox.clear()
                self._end(f"bad frame: {message.reason}")
            case Malformed() | UnknownOpcode():
                self._work_left -= 1
                self._reply(encode_failure(not_understood(message), self._dialect))
            case _:
                self._start(self._answer(message))
        return True

    async def _unpack(self, packed: Packed) -> None:
        """Decompress on a thread. This peer is not read meanwhile."""
        self._link.pause_reading()
        try:
            self._inbox.appendleft(await self._unpacked(packed))
        finally:
            self._link.resume_reading()

    async def _unpacked(self, packed: Packed) -> RequestEvent:
        if self._needs_login():
            return Malformed(packed.opcode, f"compressed payload exceeds {FLYMQ_LOGIN_INFLATED_BYTES_MAX} bytes before login")
        try:
            async with self._turns.inflations:
                plain = await asyncio.to_thread(inflate, packed.payload)
        except WireError as error:
            return Malformed(packed.opcode, str(error))
        return self._requests_decoder.unpacked(packed.opcode, plain)

    # Records.

    def _queue(self, staged: Staged | StagedMany | StagedRecord | StagedReplies | Committing | WholeCommitting | bytes) -> None:
        """Queue the reply."""
        if isinstance(staged, bytes):
            self._reply(staged)
        elif (outcome := staged.outcome) is None:
            self._reply(staged.reply(self._dialect))
        else:
            self._owe(outcome, staged.size_bytes, partial(staged.reply, self._dialect))

    def _publishes(self, batch: ProduceBatch) -> bool:
        """Stage the batch. Return False if the topic does not exist yet or its schema check takes longer."""
        try:
            self._queue(stage(self._broker, self._who, batch))
        except (UnknownTopic, SchemaCheckPending):
            return False
        return True

    async def _publish_to_new_topic(self, batch: ProduceBatch) -> None:
        try:
            await self._broker.prepare(self._who, batch.topic, batch.values)
        except BrokerError as error:
            self._broker.meters.refuse("flymq", error.code)
            self._queue(failed(batch, error))
            return
        if not self._publishes(batch):
            # The topic was deleted again in between.
            self._queue(failed(batch, UnknownTopic(batch.topic)))

    def _stages_transactions(self, batch: TxnWholeBatch | TxnBeginBatch) -> bool:
        """Stage the transactions together or, if that is impossible, each request on its own. Return False if they must wait."""
        if isinstance(batch, TxnBeginBatch):
            try:
                self._reply(self._handlers.transactions.begin_all(batch, self._dialect))
            except NotCoordinator as error:
                return self._passes_on(batch, error)
            return True
        staged = self._handlers.transactions.stage_whole(batch)
        if isinstance(staged, int):
            requests, rest = batch.split(staged)
            self._inbox.extendleft(reversed(requests if rest is None else [*requests, rest]))
        else:
            self._queue(staged)
        return True

    async def _produce_to_new_topic(self, request: TxnProduceBatch) -> None:
        self._queue(await self._handlers.transactions.produce_to_new_topic(request, self._dialect))

    def _stages_all(self, batch: CommitBatch | DelayedBatch) -> bool:
        """Stage the requests together or, if one of them fails, each on its own. Return False if they must wait."""
        try:
            if isinstance(batch, CommitBatch):
                self._queue(stage_commits(self._broker, self._who, batch))
            else:
                self._queue(stage_delayed(self._broker, self._who, batch))
        except NotCoordinator as elsewhere:
            return self._passes_on(batch, elsewhere)
        except BrokerError as error:
            if len(batch) > 1:
                self._inbox.extendleft(reversed(batch.commits() if isinstance(batch, CommitBatch) else batch.messages()))
            elif isinstance(batch, DelayedBatch) and isinstance(error, UnknownTopic | SchemaCheckPending):
                self._start(self._delay_to_new_topic(batch))
            elif isinstance(batch, CommitBatch) and isinstance(error, UnknownTopic):
                self._start(self._commit_to_new_topic(batch))
            else:
                self._reply(encode_failure(error_reply(error), self._dialect))
        return True

    async def _delay_to_new_topic(self, batch: DelayedBatch) -> None:
        try:
            await self._broker.ensure_topic(self._who, batch.topic)
            self._queue(await settled(lambda: stage_delayed(self._broker, self._who, batch)))
        except BrokerError as error:
            self._reply(encode_failure(error_reply(error), self._dialect))

    async def _commit_to_new_topic(self, batch: CommitBatch) -> None:
        try:
            self._queue(await self._broker.with_new_topics(lambda: settled(lambda: stage_commits(self._broker, self._who, batch))))
        except BrokerError as error:
            self._reply(encode_failure(error_reply(error), self._dialect))

    # Other requests.

    def _answers_now(self, request: Consume | Fetch) -> bool:
        """Answer from memory. Return False if the request must wait or fails."""
        if self._owed or not self._is_writable():
            return False
        try:
            reply = self._handlers.reading.read_now(request)
        except NotAuthorized:
            return False  # the error depends on what the principal may see
        if reply is None:
            return False
        self._work_left -= 1
        self._reply(encode_reply(opcode_of(request), reply, self._dialect))
        return True

    async def _answer(self, request: Request, slots: asyncio.Semaphore | None = None) -> None:
        """Answer the request, in one of the slots if there are any."""
        if slots is not None:
            await self._take_fetch_slot(slots)
        elsewhere: NotCoordinator | None = None
        try:
            if self._dialect is Dialect.SPEC and speaks_sdk(request):
                self._dialect = Dialect.SDK
            handler: Handler = self._handlers.find(type(request)) or self._answer_access
            answer = await self._broker.with_new_topics(lambda: handler(request))
            self._reply(encode_reply(opcode_of(request), answer, self._dialect))
        except NotCoordinator as refused:
            elsewhere = refused
        except BrokerError as error:
            self._refuse(error)
        finally:
            if slots is not None:
                slots.release()
        if elsewhere is not None:
            await self._pass_on(request, partial(self._refuse, elsewhere))

    def _refuse(self, error: BrokerError, count: int = 1) -> None:
        self._broker.meters.refuse("flymq", error.code)
        self._reply(encode_failure(error_reply(error), self._dialect) * count)

    # Handover to the coordinator.

    def _passes_on(
        self, message: CommitBatch | DelayedBatch | TxnBegin | TxnBeginBatch | TxnCommit | TxnProduceBatch, error: NotCoordinator
    ) -> bool:
        """Hand the connection over, or return False if earlier requests have no reply yet."""
        if self._owed:
            return False
        count = 1 if isinstance(message, TxnBegin | TxnCommit) else len(message)
        self._start(self._pass_on(message, partial(self._refuse, error, count)))
        return True

    def _login(self) -> Login:
        frames = [] if self._auth is None else [encode_request(self._auth)]
        if self._dialect is not self._first_dialect:
            frames.append(encode_request(ClusterMetadata("x")))  # only clients of the original send it
        return Login(frames, answer_bytes)

    def _encode(self, message: Step) -> bytes:
        return b"" if isinstance(message, _Pause) else encode_received(message)

    async def _answer_access(self, request: AccessRequest) -> Reply:
        if self._access is None:
            raise InvalidRequest("user management is not available on this broker")
        reply = await self._access.answer(request)
        if self._access.who != self._who:
            self._who = self._handlers.who = self._access.who
            self._requests_decoder.inflated_bytes_max = self._inflated_bytes_max
            self._handlers.abandon()
            self._auth = request if isinstance(request, Auth) and not self._broker.is_coordinator else None
            if self._dialect is Dialect.SPEC and self._access.speaks_sdk:
                self._dialect = Dialect.SDK
        return reply
