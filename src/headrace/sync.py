"""Blocking clients for code without an event loop, with the same methods and arguments.

    with headrace.sync.connect("flymq://127.0.0.1") as client:
        client.publish("demo", b"hello")
        for message in client.subscribe("demo", "earliest", group="billing"):
            message.ack()

Each client has its own thread with an event loop. Any other thread may use the client.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from headrace.clients.api import Client, Subscription
from headrace.clients.connect import Connecting
from headrace.clients.connect import connect as connect_async
from headrace.clients.errors import ClientClosed
from headrace.clients.messages import GroupMode, Message, MessageBatch, ReceivedRecord, Settlement, Start, Transaction
from headrace.records import Headers

__all__ = ["SyncClient", "SyncMessage", "SyncSubscription", "SyncTransaction", "connect"]

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")


class _LoopThread:
    """Event loop in a daemon thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace-client", daemon=True)
        self._thread.start()

    def wait(self, work: Callable[[], Coroutine[Any, Any, _Answer]]) -> _Answer:
        """Run `work` on the loop and return its result. An interrupt cancels the work."""
        if self._loop.is_closed():
            raise ClientClosed("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()


def _blocking(
    method: Callable[Concatenate[Client, _Arguments], Coroutine[Any, Any, _Answer]],
) -> Callable[Concatenate[SyncClient, _Arguments], _Answer]:
    """Return a method of `SyncClient` that waits for the method of `Client` of the same name."""
    name = method.__name__

    @functools.wraps(method)
    def wait(self: SyncClient, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
        return self._thread.wait(lambda: cast(Coroutine[Any, Any, _Answer], getattr(self._client, name)(*args, **kwargs)))

    return wait


@dataclass(frozen=True, slots=True)
class SyncMessage(ReceivedRecord):
    """One received record. `ack` and `nack` return when the broker has answered, as `Message` does with `await`."""

    _message: Message | None = field(default=None, compare=False, repr=False)
    _thread: _LoopThread | None = field(default=None, compare=False, repr=False)

    def ack(self) -> bool:
        """Acknowledge the message: see `Message.ack`."""
        assert self._message is not None and self._thread is not None, "a client delivered it"
        return self._thread.wait(self._message.ack)

    def nack(self) -> bool:
        """Request another delivery: see `Message.nack`."""
        assert self._message is not None and self._thread is not None, "a client delivered it"
        return self._thread.wait(self._message.nack)

    def __enter__(self) -> SyncMessage:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        """Acknowledge the message if the block succeeds. Otherwise it is delivered again."""
        if failure is None:
            self.ack()


def _message(thread: _LoopThread, message: Message) -> SyncMessage:
    shared = {known.name: getattr(message, known.name) for known in fields(ReceivedRecord)}
    return SyncMessage(**shared, _message=message, _thread=thread)


class SyncSubscription:
    """Blocking iterator of messages. Ends when it is closed."""

    def __init__(self, thread: _LoopThread, subscription: Subscription) -> None:
        self._thread, self._subscription = thread, subscription
        self.topic = subscription.topic

    def __iter__(self) -> SyncSubscription:
        return self

    def __next__(self) -> SyncMessage:
        message = self.next()
        if message is None:
            raise StopIteration
        return message

    def next(self, timeout: float | None = None) -> SyncMessage | None:
        """Return the next message; None after `timeout`, or when the subscription is closed."""

        async def wait() -> Message | None:
            try:
                async with asyncio.timeout(timeout):
                    return await anext(self._subscription)
            except (TimeoutError, StopAsyncIteration):
                return None

        message = self._thread.wait(wait)
        return None if message is None else _message(self._thread, message)

    def batches(self) -> Iterator[MessageBatch]:
        """Iterate over batches of columns."""
        batches = self._subscription.batches()

        async def wait() -> MessageBatch | None:
            return await anext(batches, None)

        while (batch := self._thread.wait(wait)) is not None:
            yield batch

    def commit(self) -> None:
        """Settle every message delivered so far. Raises `NothingToSettle` without a group."""
        self._thread.wait(self._subscription.commit)

    def seek(self, offset: int, *, partition: int = 0) -> None:
        """Continue at another offset."""

        async def seek() -> None:
            self._subscription.seek(offset, partition=partition)

        self._thread.wait(seek)

    def close(self) -> None:
        """End the iteration. Automatic settlement settles every message delivered so far."""
        self._thread.wait(self._subscription.close)


class SyncTransaction:
    """Records of several topics that become visible atomically: at the end of the block, or not at all if it fails."""

    def __init__(self, thread: _LoopThread, transaction: Transaction) -> None:
        self._thread, self._transaction = thread, transaction

    def __enter__(self) -> SyncTransaction:
        self._thread.wait(self._transaction.__aenter__)
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.wait(lambda: self._transaction.__aexit__(kind, failure, trace))

    def publish(self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()) -> None:
        """Stage a record. It becomes visible with the commit."""
        self._thread.wait(lambda: self._transaction.publish(topic, value, key=key, partition=partition, headers=headers))

    def commit_offset(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        """Stage the next offset of a group, which takes effect with the commit. Raises `NotSupported`."""
        self._thread.wait(lambda: self._transaction.commit_offset(topic, offset, group=group, partition=partition))


class SyncClient:
    """Blocking client, created by `connect`. Methods and errors are those of `headrace.Client`."""

    def __init__(self, thread: _LoopThread, client: Client) -> None:
        self._thread, self._client = thread, client

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if failure is None:
            self.close()
        else:
            self.abandon()

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @property
    def unacknowledged(self) -> int:
        """Number of records published and not acknowledged."""
        return self._client.unacknowledged

    publish = _blocking(Client.publish)
    publish_many = _blocking(Client.publish_many)
    publish_with_ttl = _blocking(Client.publish_with_ttl)
    publish_delayed = _blocking(Client.publish_delayed)
    cancel_delayed = _blocking(Client.cancel_delayed)
    flush = _blocking(Client.flush)
    commit = _blocking(Client.commit)
    committed = _blocking(Client.committed)
    seek = _blocking(Client.seek)
    offset_for_time = _blocking(Client.offset_for_time)
    create_topic = _blocking(Client.create_topic)
    delete_topic = _blocking(Client.delete_topic)
    topics = _blocking(Client.topics)
    ping = _blocking(Client.ping)

    def transaction(self) -> SyncTransaction:
        """Return a transaction: `with client.transaction() as transaction: transaction.publish(…)`."""
        return SyncTransaction(self._thread, self._client.transaction())

    def fetch(
        self, topic: str, offset: Start = "earliest", *, partition: int = 0, group: str | None = None, records_max: int | None = None
    ) -> list[SyncMessage]:
        """Return records from `offset`, or from the group's committed offset if that is higher. An empty list means none."""
        messages = self._thread.wait(lambda: self._client.fetch(topic, offset, partition=partition, group=group, records_max=records_max))
        return [_message(self._thread, message) for message in messages]

    def subscribe(
        self,
        topic: str,
        start: Start = "latest",
        *,
        partition: int | None = None,
        group: str | None = None,
        settlement: Settlement = "explicit",
        mode: GroupMode | None = None,
    ) -> SyncSubscription:
        """Follow a topic or one partition: see `Client.subscribe`."""
        made = self._thread.wait(
            lambda: self._client.subscribe(topic, start, partition=partition, group=group, settlement=settlement, mode=mode)
        )
        return SyncSubscription(self._thread, made)

    def ack(self, message: SyncMessage) -> bool:
        """Acknowledge a message: see `SyncMessage.ack`."""
        return message.ack()

    def nack(self, message: SyncMessage) -> bool:
        """Request another delivery: see `SyncMessage.nack`."""
        return message.nack()

    def close(self, timeout: float = 10.0) -> None:
        """Close the client as `Client.close` does and end the thread. A second call does nothing."""
        try:
            self._thread.wait(lambda: self._client.close(timeout))
        except ClientClosed:
            return
        finally:
            self._thread.close()

    def abandon(self) -> tuple[int, int]:
        """Close the client as `Client.abandon` does and end the thread."""

        async def abandon() -> tuple[int, int]:
            return self._client.abandon()

        try:
            return self._thread.wait(abandon)
        except ClientClosed:
            return 0, 0
        finally:
            self._thread.close()


def _waiting(connect: Callable[_Arguments, Connecting]) -> Callable[_Arguments, SyncClient]:
    """Return a function with the arguments of `headrace.connect` that waits for the connection."""

    @functools.wraps(connect)
    def connect_and_wait(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> SyncClient:
        connecting = connect(*args, **kwargs)

        async def connected() -> Client:
            return await connecting

        thread = _LoopThread()
        try:
            return SyncClient(thread, thread.wait(connected))
        except BaseException:
            thread.close()
            raise

    return connect_and_wait


connect = _waiting(connect_async)
"""Connect as `headrace.connect` does and wait for the connection. The client's thread calls `on_state`."""
