"""Following: long polls for the records that others write to watched partitions, one for each node that leads some of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

from aiokafka import errors as kafka_errors

from headrace.engine.kafka.cluster import Cluster
from headrace.engine.kafka.codec import Decoded
from headrace.engine.kafka.partition import PartitionLog
from headrace.limits import MIB

_FOLLOW_BYTES: Final = 1 * MIB
_FOLLOW_WAIT_MS: Final = 300
_PAUSE_SECONDS: Final = 0.2
_LINGER_SECONDS: Final = 5.0
_COMMIT_SECONDS: Final = 0.005


class Followers:
    """Watched partitions and the tasks that follow them. `moved` is called with the partitions whose end has moved."""

    def __init__(self, cluster: Cluster, moved: Callable[[Iterable[PartitionLog]], None]) -> None:
        self._cluster, self._moved = cluster, moved
        self._watched: dict[PartitionLog, None] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """By the number of the node."""
        self._timer: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        """Follow nothing any more. Partitions may be watched again."""
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._tasks.clear()

    def watch(self, log: PartitionLog, wake: Callable[[], None]) -> Callable[[], None]:
        """Call `wake` when the end of the partition has moved, until the returned function is called."""
        token = object()
        log.watchers[token] = wake
        if log not in self._watched:
            self._watched[log] = None
            self.follow()

        def stop() -> None:
            log.watchers.pop(token, None)
            if not log.watchers:
                self._watched.pop(log, None)

        return stop

    def linger(self, log: PartitionLog) -> None:
        """Follow a partition for a while that a client has read to its end: a client that polls asks again soon, and must not wait for
        the next refresh to see the records of other brokers."""
        asyncio.get_running_loop().call_later(_LINGER_SECONDS, self.watch(log, lambda: None))

    def forget(self, log: PartitionLog) -> None:
        """Stop following a partition that is gone."""
        self._watched.pop(log, None)

    def follow(self) -> None:
        """Start a task for each node that leads a watched partition and has none."""
        places = self._cluster.by_leader(log.place for log in self._watched)
        if sum(map(len, places.values())) < len(self._watched) and self._timer is None:
            # The client library does not know the leader of each partition yet.
            self._timer = asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._follow_later)
        for node in places:
            if node not in self._tasks:
                task = self._tasks[node] = asyncio.get_running_loop().create_task(self._follow_node(node))
                task.add_done_callback(partial(self._ended, node))

    def _follow_later(self) -> None:
        self._timer = None
        self.follow()

    def _ended(self, node: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(node, None)

    async def _follow_node(self, node: int) -> None:
        """Wait for records of others in the watched partitions of a node, until there is no such partition."""
        while True:
            by_place = {log.place: log for log in self._watched}
            places = self._cluster.by_leader(by_place).get(node)
            if not places:
                return
            try:
                asked = {place: by_place[place].end for place in places}
                answers = await self._cluster.follow(node, asked, bytes_max=_FOLLOW_BYTES, wait_ms=_FOLLOW_WAIT_MS)
            except (kafka_errors.KafkaError, OSError):
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            moved = []
            for answer in answers:
                log = by_place[answer.topic, answer.partition]
                if answer.error is not kafka_errors.NoError:
                    await asyncio.sleep(_PAUSE_SECONDS)
                elif log.is_committing:
                    await asyncio.sleep(_COMMIT_SECONDS)
                elif answer.stable_end > log.end:
                    asked_from = asked[log.place]
                    if asked_from == log.end:
                        decoded = Decoded(answer.content, answer.aborted, asked_from)
                        if decoded.batches:
                            log.remember(asked_from, decoded.batches)
                    log.advance(answer.stable_end)
                    moved.append(log)
            self._moved(moved)
