"""Blocking clients for code without an event loop, with the same methods.

    with headrace.sync.connect("flymq://127.0.0.1") as client:
        client.publish("demo", b"hello")
        for message in client.subscribe("demo", "earliest", group="billing"):
            client.ack(message)

Each client has its own thread with an event loop. Any other thread may use the client.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from headrace.clients.api import Client, Subscription
from headrace.clients.backoff import Backoff
from headrace.clients.connect import connect as connect_async
from headrace.clients.errors import ClientClosed
from headrace.clients.messages import GroupMode, Key, Message, MessageBatch, OnState, Receipt, Settlement, Start
from headrace.records import Headers

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


class SyncSubscription:
    """Blocking iterator of messages. Ends when it is closed."""

    def __init__(self, thread: _LoopThread, subscription: Subscription) -> None:
        self._thread, self._subscription = thread, subscription
        self.topic = subscription.topic

    def __iter__(self) -> SyncSubscription:
        return self

    def __next__(self) -> Message:
        message = self.next()
        if message is None:
            raise StopIteration
        return message

    def next(self, timeout: float | None = None) -> Message | None:
        """Return the next message; None after `timeout`, or when the subscription is closed."""

        async def wait() -> Message | None:
            try:
                async with asyncio.timeout(timeout):
                    return await anext(self._subscription)
            except (TimeoutError, StopAsyncIteration):
                return None

        return self._thread.wait(wait)

    def batches(self) -> Iterator[MessageBatch]:
        """Iterate over batches of columns."""
        batches = self._subscription.batches()

        async def wait() -> MessageBatch | None:
            return await anext(batches, None)

        while (batch := self._thread.wait(wait)) is not None:
            yield batch

    def commit(self) -> None:
        self._thread.wait(self._subscription.commit)

    def seek(self, offset: int, *, partition: int = 0) -> None:
        async def seek() -> None:
            self._subscription.seek(offset, partition=partition)

        self._thread.wait(seek)

    def close(self) -> None:
        self._thread.wait(self._subscription.close)


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
        return self._client.unacknowledged

    def publish(
        self, topic: str, value: bytes, *, key: bytes | None = None, partition: int | None = None, headers: Headers = ()
    ) -> Receipt:
        return self._thread.wait(lambda: self._client.publish(topic, value, key=key, partition=partition, headers=headers))

    def publish_many(self, topic: str, values: Iterable[bytes], *, key: Key = None, partition: int | None = None) -> int:
        """Publish all values. The client's thread iterates over them."""
        return self._thread.wait(lambda: self._client.publish_many(topic, values, key=key, partition=partition))

    def flush(self) -> None:
        self._thread.wait(self._client.flush)

    def fetch(
        self, topic: str, offset: Start = "earliest", *, partition: int = 0, group: str | None = None, records_max: int | None = None
    ) -> list[Message]:
        return self._thread.wait(lambda: self._client.fetch(topic, offset, partition=partition, group=group, records_max=records_max))

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
        made = self._thread.wait(
            lambda: self._client.subscribe(topic, start, partition=partition, group=group, settlement=settlement, mode=mode)
        )
        return SyncSubscription(self._thread, made)

    def ack(self, message: Message) -> bool:
        """Acknowledge a message: see `Message.ack`."""
        return self._thread.wait(message.ack)

    def nack(self, message: Message) -> bool:
        """Request another delivery: see `Message.nack`."""
        return self._thread.wait(message.nack)

    def commit(self, topic: str, offset: int, *, group: str, partition: int = 0) -> None:
        self._thread.wait(lambda: self._client.commit(topic, offset, group=group, partition=partition))

    def committed(self, topic: str, *, group: str, partition: int = 0) -> int | None:
        return self._thread.wait(lambda: self._client.committed(topic, group=group, partition=partition))

    def seek(self, topic: str, *, group: str, partition: int = 0, offset: int | None = None, timestamp: int | None = None) -> int:
        return self._thread.wait(lambda: self._client.seek(topic, group=group, partition=partition, offset=offset, timestamp=timestamp))

    def offset_for_time(self, topic: str, timestamp: int, *, partition: int = 0) -> int:
        return self._thread.wait(lambda: self._client.offset_for_time(topic, timestamp, partition=partition))

    def create_topic(self, topic: str, *, partitions: int = 1) -> None:
        self._thread.wait(lambda: self._client.create_topic(topic, partitions=partitions))

    def delete_topic(self, topic: str) -> None:
        self._thread.wait(lambda: self._client.delete_topic(topic))

    def topics(self) -> list[str]:
        return self._thread.wait(self._client.topics)

    def ping(self) -> None:
        self._thread.wait(self._client.ping)

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


def connect(
    url: str,
    *,
    api_key: bytes | str | None = None,
    ca_file: Path | str | None = None,
    certificate_file: Path | str | None = None,
    key_file: Path | str | None = None,
    server_name: str | None = None,
    connect_seconds: float | None = None,
    backoff: Backoff | None = None,
    on_state: OnState | None = None,
    resend_writes: bool | None = None,
    options: object | None = None,
) -> SyncClient:
    """Connect as `headrace.connect` does and wait for the connection. The client's thread calls `on_state`."""
    connecting = connect_async(
        url,
        api_key=api_key,
        ca_file=ca_file,
        certificate_file=certificate_file,
        key_file=key_file,
        server_name=server_name,
        connect_seconds=connect_seconds,
        backoff=backoff,
        on_state=on_state,
        resend_writes=resend_writes,
        options=options,
    )

    async def connected() -> Client:
        return await connecting

    thread = _LoopThread()
    try:
        return SyncClient(thread, thread.wait(connected))
    except BaseException:
        thread.close()
        raise
