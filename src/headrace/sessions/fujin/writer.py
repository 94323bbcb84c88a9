"""Writer side of a Fujin stream: WRITEs, and transactions that belong to the writer's id.

Each WRITE is answered when it is as durable as its topic requires, in the order of completion. Inside a transaction a WRITE is answered
when it is staged; the reply to the COMMIT then confirms durability.

Of two writers with the same id, the newer one owns the transactions. The older one is *fenced*: its open transaction is aborted, and its
BEGIN, COMMIT and transactional WRITEs fail from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeAlias

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.publishing.published import Published
from headrace.broker.schema_checks import SchemaCheckPending
from headrace.broker.transactions import Transaction
from headrace.errors import BrokerError, InvalidRecord, UnknownTopic
from headrace.records import RecordBatch
from headrace.sessions.chunks import publish_in_chunks
from headrace.sessions.fujin.errors import FENCED, INVALID_TX_STATE, WRITER_NOT_FOUND, text
from headrace.sessions.fujin.settings import FujinSettings
from headrace.sessions.request_ids import log_refused
from headrace.sessions.session import RECORD_OVERHEAD_BYTES, Encode, Work
from headrace.wire.fujin import Reply, Request, Transact, WriteBatch, encode

Owe: TypeAlias = Callable[[asyncio.Future[Any], int, Encode], None]
_REPLIES: Final = {Request.BEGIN: Reply.BEGIN, Request.COMMIT: Reply.COMMIT, Request.ROLLBACK: Reply.ROLLBACK}


class Fenceable(Protocol):
    """A holder of a writer id."""

    def fence(self) -> asyncio.Future[None] | None:
        """Give up the id. The future is done when nothing more can be committed under it; None means at once."""


class WriterIds:
    """Holders of writer ids over all streams."""

    def __init__(self) -> None:
        self._holders: dict[tuple[str, bytes], Fenceable] = {}

    def take(self, key: tuple[str, bytes], holder: Fenceable) -> asyncio.Future[None] | None:
        """Give the id to `holder`. The future is done when its predecessor can commit nothing more."""
        before = self._holders.get(key)
        self._holders[key] = holder
        return None if before is None else before.fence()

    def release(self, key: tuple[str, bytes], holder: Fenceable) -> None:
        if self._holders.get(key) is holder:
            del self._holders[key]

    def __len__(self) -> int:
        return len(self._holders)


class Writer:
    """Writer of one stream. `reply` and `owe` send replies (`BaseSession`)."""

    def __init__(
        self,
        broker: Broker,
        who: Principal,
        settings: FujinSettings,
        ids: WriterIds,
        id: int | bytes | None,
        *,
        peer: str,
        reply: Callable[[bytes], None],
        owe: Owe,
    ) -> None:
        self._broker, self._who, self._settings = broker, who, settings
        self._peer, self._reply, self._owe = peer, reply, owe
        self._transaction: Transaction | None = None
        self._committing: asyncio.Future[None] | None = None
        self._is_fenced = False
        self._ids, self._key = ids, None if id is None else (who.name, id if isinstance(id, bytes) else b"%d" % id)
        self._predecessor = None if self._key is None else ids.take(self._key, self)

    def handle(self, message: WriteBatch | Transact) -> Work | None:
        if isinstance(message, Transact):
            return self._transact(message)
        topic = self._settings.connectors.writer(message.name)
        if topic is None:
            self._refuse(message, WRITER_NOT_FOUND)
            return None
        if self._transaction is not None:
            return self._stage(message, topic)
        return self._publish(message, topic)

    def left(self) -> None:
        """Roll back the open transaction, and give up the id."""
        self._abort()
        if self._key is not None:
            self._ids.release(self._key, self)

    def fence(self) -> asyncio.Future[None] | None:
        self._is_fenced = True
        if self._transaction is not None:
            self._transaction.abort()  # no effect on a transaction that is being committed: the successor waits for it
        return self._committing or self._predecessor

    # Writing.

    def _publish(self, batch: WriteBatch, topic: str, *, may_create: bool = True) -> Work | None:
        try:
            published = self._broker.publish(self._who, topic, RecordBatch(batch.values, headers=batch.headers))
        except (UnknownTopic, SchemaCheckPending) as error:
            if may_create:
                return self._create(batch, topic, self._publish)
            self._refuse(batch, self._text(error))
        except InvalidRecord:
            self._publish_in_chunks(batch, topic)
        except BrokerError as error:
            self._refuse(batch, self._text(error))
        else:
            self._await(batch, published)
        return None

    def _publish_in_chunks(self, batch: WriteBatch, topic: str) -> None:
        whole = RecordBatch(batch.values, headers=batch.headers)
        for begin, end, outcome in publish_in_chunks(
            lambda begin, end: self._broker.publish(self._who, topic, whole[begin:end]), len(whole)
        ):
            chunk = WriteBatch(
                batch.name, batch.cids[begin:end], batch.values[begin:end], None if batch.headers is None else batch.headers[begin:end]
            )
            if isinstance(outcome, BrokerError):
                self._refuse(chunk, self._text(outcome))
            else:
                self._await(chunk, outcome)

    async def _create(self, batch: WriteBatch, topic: str, then: Callable[..., Work | None]) -> None:
        """Create the topic, then continue. If the topic is deleted again in between, the write fails."""
        try:
            await self._broker.prepare(self._who, topic, batch.values)
        except BrokerError as error:
            self._refuse(batch, self._text(error))
        else:
            then(batch, topic, may_create=False)

    def _await(self, batch: WriteBatch, published: asyncio.Future[Published]) -> None:
        """Reply when the result is there. Only the cids are kept, not the values."""
        size_bytes = sum(map(len, batch.values)) + RECORD_OVERHEAD_BYTES * len(batch.values)
        self._owe(published, size_bytes, partial(self._written, batch.cids, published))

    def _written(self, cids: list[bytes], published: asyncio.Future[Published]) -> bytes:
        failure = published.exception()
        if not isinstance(failure, BrokerError):
            return encode.written(cids)
        error = text(failure, WRITER_NOT_FOUND)
        log_refused("fujin", self._peer, error, cids)
        return encode.write_failed(cids, error)

    def _refuse(self, batch: WriteBatch, error: str) -> None:
        log_refused("fujin", self._peer, error, batch.cids)
        self._reply(encode.write_failed(batch.cids, error))

    # Transactions.

    def _transact(self, message: Transact) -> Work | None:
        if (self._transaction is None) is not (message.request is Request.BEGIN):
            self._answer(message, INVALID_TX_STATE)
        elif message.request is Request.ROLLBACK:
            self._abort()
            self._answer(message)
        elif self._is_fenced:
            self._answer(message, FENCED)
        elif message.request is Request.COMMIT:
            return self._commit(message)
        elif self._predecessor is not None and not self._predecessor.done():
            return self._begin_after(self._predecessor, message)
        else:
            self._begin(message)
        return None

    async def _begin_after(self, predecessor: asyncio.Future[None], message: Transact) -> None:
        """Begin after the fenced writer has finished its commit."""
        await asyncio.wait([predecessor])
        self._transact(message)

    def _text(self, error: BrokerError) -> str:
        self._broker.meters.refuse("fujin", error.code)
        return text(error, WRITER_NOT_FOUND)

    def _begin(self, message: Transact) -> None:
        name = None if self._key is None else self._key[1].decode(errors="backslashreplace")
        try:
            self._transaction = self._broker.begin(self._who, id=name, timeout_ms=self._settings.transaction_timeout_ms)
        except BrokerError as error:
            self._answer(message, self._text(error))
        else:
            self._answer(message)

    def _stage(self, batch: WriteBatch, topic: str, *, may_create: bool = True) -> Work | None:
        if self._transaction is None or self._is_fenced:
            self._refuse(batch, FENCED)
            return None
        try:
            self._transaction.publish(topic, RecordBatch(batch.values, headers=batch.headers))
        except (UnknownTopic, SchemaCheckPending) as error:
            if may_create:
                return self._create(batch, topic, self._stage)
            self._refuse(batch, self._text(error))
        except BrokerError as error:
            self._refuse(batch, self._text(error))
        else:
            self._reply(encode.written(batch.cids))
        return None

    async def _commit(self, message: Transact) -> None:
        """Commit. After an error the transaction stays open: the client may retry the COMMIT or send a ROLLBACK."""
        assert self._transaction is not None
        committing = self._committing = asyncio.get_running_loop().create_future()
        try:
            await self._transaction.commit()
        except BrokerError as error:
            self._answer(message, FENCED if self._is_fenced else self._text(error))
        else:
            self._transaction = None
            self._answer(message)
        finally:
            self._committing = None
            committing.set_result(None)

    def _answer(self, message: Transact, error: str | None = None) -> None:
        if error is not None:
            log_refused("fujin", self._peer, error, [message.cid])
        self._reply(encode.answered(_REPLIES[message.request], message.cid, error))

    def _abort(self) -> None:
        if self._transaction is not None:
            self._transaction.abort()
            self._transaction = None
