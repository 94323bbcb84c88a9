"""Records of `headrace sub`: subscriptions to one or several topics, printed as they arrive."""

from __future__ import annotations

import asyncio
import os
import stat
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Final

import click

from headrace.cli import terminal
from headrace.cli.fetching import detailed, last_positions, write
from headrace.cli.printed import PrintedRecord, table_head
from headrace.cli.reading import Last, Output
from headrace.cli.servers import Server
from headrace.cli.topic_names import chosen_topics, is_pattern, matching, suggesting
from headrace.clients.api import Client, Subscription
from headrace.clients.connect import SCHEMES
from headrace.clients.flymq.client import FlyMqClient
from headrace.clients.messages import GroupMode, Message, Settlement, Start

SETTLE_SECONDS: Final = 5.0
"""Longest wait for the final commit."""
_NEW_TOPICS_SECONDS: Final = 2.0
"""Interval of looking for new topics that match a pattern."""


class Following:
    """State of one `sub` command."""

    def __init__(
        self,
        server: Server,
        name: str,
        start: Start | Last | None,
        count: int | None,
        group: str | None,
        mode: GroupMode | None,
        partition: int | None,
        output: Output,
    ) -> None:
        self._server, self._name, self._group, self._partition, self._output = server, name, group, partition, output
        self._mode = mode
        self._start, self._left = start, count
        self._is_settling: bool = group is not None or SCHEMES[server.protocol].settles
        self._printing = asyncio.Lock()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        """Set when a task has ended: all records are printed, or it failed."""

    async def run(self) -> int:
        client = await self._server.connect()
        try:
            async with suggesting(client):
                topics = await chosen_topics(client, self._name)
                subscriptions = await self._subscribe(client, topics)
                if self._output.name == "table" and self._output.template is None:
                    terminal.write(table_head())
                if topics == [self._name]:
                    await self._follow_one(client, subscriptions[0])
                else:
                    await _until_reader_left(self._follow_all(client, subscriptions))
        finally:
            client.abandon()
        return 0

    async def _subscribe(self, client: Client, topics: list[str]) -> list[Subscription]:
        """Subscribe to the topics. Several topics settle each record after it is printed: a record that waits must stay unsettled."""
        settlement: Settlement = "auto" if self._is_settling and topics == [self._name] else "explicit"
        if not isinstance(self._start, Last):
            begin = () if self._start is None else (self._start,)
            return [
                await client.subscribe(topic, *begin, partition=self._partition, group=self._group, settlement=settlement, mode=self._mode)
                for topic in topics
            ]
        assert isinstance(client, FlyMqClient), "checked with the options"
        places = await last_positions(client, topics, self._start.count, self._partition)
        found: list[Subscription] = []
        for topic in topics:
            found.append(await client.subscribe(topic, "latest", partition=self._partition))
            for (name, partition), offset in places.items():
                if name == topic:
                    found[-1].seek(offset, partition=partition)
        return found

    # One topic.

    async def _follow_one(self, client: Client, subscription: Subscription) -> None:
        try:
            await _until_reader_left(self._print(client, subscription))
        except asyncio.CancelledError:
            if self._is_settling:
                await _settle(subscription)
            raise
        if self._is_settling:
            await _settle(subscription)

    async def _print(self, client: Client, subscription: Subscription, *, acks: bool = False) -> None:
        """Print records until enough are printed. `acks`: settle each batch after it is printed."""
        gaps = _Gaps(subscription, self._start, self._server.quiet)
        gaps.report()
        if self._left is None and not acks and self._output == ("raw", None):
            async for batch in subscription.batches():  # the fast path: no object per record
                gaps.report()
                terminal.write(b"\n".join(batch.values) + b"\n")
            return
        source = _all_at_once(subscription) if self._left is None and not acks else _singly(subscription)
        async for messages in source:
            gaps.report()
            records = await detailed(client, messages) if self._output.needs_details else [PrintedRecord.of(one) for one in messages]
            async with self._printing:
                if self._left == 0:
                    return
                write(records, self._output)
                if self._left is not None:
                    self._left -= 1
            if acks:
                await messages[-1].ack()
            if self._left == 0:
                return

    # Several topics.

    async def _follow_all(self, client: Client, subscriptions: list[Subscription]) -> None:
        for subscription in subscriptions:
            self._start_task(client, subscription)
        watching = asyncio.ensure_future(self._watch_for_new(client)) if is_pattern(self._name) else None
        try:
            while True:
                await self._ended.wait()
                self._ended.clear()
                for task in self._tasks.values():
                    if task.done():
                        task.result()  # raises what it raised
                if self._left == 0:
                    return
                if watching is not None and watching.done():
                    watching.result()
        finally:
            tasks = [*self._tasks.values(), *([watching] if watching is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _start_task(self, client: Client, subscription: Subscription) -> None:
        task = asyncio.ensure_future(self._print(client, subscription, acks=self._is_settling))
        task.add_done_callback(lambda _: self._ended.set())
        self._tasks[subscription.topic] = task

    async def _watch_for_new(self, client: Client) -> None:
        """Follow topics that are created while the command runs, from their first record on."""
        while True:
            await asyncio.sleep(_NEW_TOPICS_SECONDS)
            for topic in matching(self._name, await client.topics()):
                if topic not in self._tasks:
                    subscription = await client.subscribe(topic, "earliest", partition=self._partition, group=self._group, mode=self._mode)
                    self._start_task(client, subscription)


class _Gaps:
    """Reports offsets where reading resumed elsewhere than requested."""

    def __init__(self, subscription: Subscription, start: Start | Last | None, quiet: bool) -> None:
        self._subscription, self._start, self._quiet = subscription, start, quiet
        self._reported = 0

    def report(self) -> None:
        for gap in self._subscription.gaps[self._reported :]:
            self._reported += 1
            if not self._quiet and not (self._start == "earliest" and gap.expected == 0):
                click.echo(f"{self._subscription.topic}: offset {gap.expected} does not exist; starting at {gap.actual}", err=True)


async def _all_at_once(subscription: Subscription) -> AsyncIterator[list[Message]]:
    async for batch in subscription.batches():
        yield [batch.message(index) for index in range(len(batch))]


async def _singly(subscription: Subscription) -> AsyncIterator[list[Message]]:
    """Yield single records: records that are not printed must not be settled."""
    async for message in subscription:
        yield [message]


async def _settle(subscription: Subscription) -> None:
    """Settle the printed records."""
    try:
        async with asyncio.timeout(SETTLE_SECONDS):
            await asyncio.shield(subscription.close())
    except TimeoutError:
        raise click.ClickException(f"no commit within {SETTLE_SECONDS:g} s; the last printed records may be delivered again") from None


async def _until_reader_left(work: Coroutine[None, None, None]) -> None:
    """Run `work`. Raises `BrokenPipeError` when the output is closed: the last records may be unread and are not settled."""
    reader_left = asyncio.ensure_future(_reader_left())
    printing = asyncio.ensure_future(work)
    try:
        await asyncio.wait([printing, reader_left], return_when=asyncio.FIRST_COMPLETED)
        if not printing.done():
            raise BrokenPipeError
        printing.result()
    finally:
        for task in (printing, reader_left):
            task.cancel()
        await asyncio.gather(printing, reader_left, return_exceptions=True)


async def _reader_left() -> None:
    """Wait until the reader closes the pipe (`headrace sub … | head -1`): without new records, no write would fail."""
    loop = asyncio.get_running_loop()
    left = asyncio.Event()
    try:
        output = sys.stdout.fileno()
    except OSError:  # stdout is not a file
        await left.wait()
        return
    if stat.S_ISFIFO(os.fstat(output).st_mode):
        loop.add_reader(output, left.set)
    try:
        await left.wait()
    finally:
        loop.remove_reader(output)
