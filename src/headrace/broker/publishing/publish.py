"""Publishing: checks a batch of records, assigns partitions and appends it.

`Publisher.publish` is on the hot path (thousands of batches per second). It looks up what it needs about a topic and a principal once
and keeps it as a `Route` until the topic or the rules change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from headrace.broker.authorizer import Principal
from headrace.broker.meters import Meter, Meters
from headrace.broker.publishing.partitioner import assign, pick
from headrace.broker.publishing.requirements import NOWHERE, Divert, OnInvalid, Rule
from headrace.broker.settings import Clock
from headrace.broker.tracing import Tracer
from headrace.engine.contract import Ack, Appended, Engine, Topic, Write
from headrace.errors import BrokerError, InvalidRequest, Unavailable, UnknownPartition
from headrace.records import AnyBatch, ColumnBatch, RecordBatch

_ROUTES_MAX: Final = 65_536


@dataclass(slots=True)
class Published:
    """Position of a published batch."""

    partition: int
    """Partition of the first record."""
    base_offset: int
    """Offset of the first record."""
    count: int
    timestamp: int
    """Unix ms of the first record."""
    placements: list[tuple[int, int]] | None = None
    """(partition, offset) of each record if the batch is not contiguous in one partition, else None. `requirements.NOWHERE` for a
    record that the topic's rule moved to the dead letters."""

    def placement(self, index: int) -> tuple[int, int]:
        """Return (partition, offset) of the record with this index in the batch."""
        if self.placements is not None:
            return self.placements[index]
        return self.partition, self.base_offset + index


@dataclass(frozen=True, slots=True)
class ProducerStamp:
    """Id of the producer of a batch and the sequence number of its first record. The following records count up from it."""

    id: str
    sequence: int


class Route:
    """Cached facts about a topic that a publish needs."""

    __slots__ = ("_clock", "_ttl_ms", "meters", "partitions", "rule", "topic", "turn")

    def __init__(self, topic: Topic, clock: Clock, rule: Rule | None = None) -> None:
        self.topic = topic.name
        self.meters: dict[str, Meter] = {}
        """By protocol, as far as it has published."""
        self.rule = rule
        """Requirement on the topic's records, if there is one."""
        self.partitions = topic.partitions
        self.turn = 0
        self._ttl_ms = topic.config.ttl_ms
        self._clock = clock

    def check(self, batch: AnyBatch) -> None:
        """Raise `InvalidRecord` for a record that the topic's rule rejects. A record that the rule moves to the dead letters passes."""
        if self.rule is not None and self.rule.on_invalid is OnInvalid.REJECT:
            self.rule.sift(_listed(batch), Divert.NEVER)

    def next_turn(self) -> int:
        self.turn = turn = (self.turn + 1) % self.partitions
        return turn

    def stamped(self, batch: AnyBatch) -> AnyBatch:
        """Return the batch to write: records without an expiry get the topic's."""
        if not self._ttl_ms:
            return batch
        expiry = self._clock() + self._ttl_ms
        if isinstance(batch, ColumnBatch):
            return batch.expiring(expiry)
        expiries = [expiry] * len(batch) if batch.expiries is None else [own or expiry for own in batch.expiries]
        return replace(batch, expiries=expiries)


def _listed(batch: AnyBatch) -> RecordBatch:
    """Return the batch as lists, for code that inspects single records (rules and the partitioner)."""
    return batch.record_batch() if isinstance(batch, ColumnBatch) else batch


class Placing:
    """A batch divided over partitions: the writes, and the mapping of their results back to the batch."""

    __slots__ = ("_sifted", "assigned", "partition", "rule", "topic", "writes")

    def __init__(self, route: Route, batch: AnyBatch, partition: int | None, divert: Divert = Divert.AS_RULED) -> None:
        """Raises `UnknownPartition`, and `InvalidRecord` for the first record that the topic's rule rejects."""
        if not len(batch):
            raise InvalidRequest("a batch needs at least one record")
        batch = route.stamped(batch)
        self.assigned: dict[int, list[int]] | None = None
        self.topic = route.topic
        self.rule = route.rule
        self._sifted = None if route.rule is None else route.rule.sift(_listed(batch), divert)
        if self._sifted is not None:
            batch = self._sifted.batch
        self._assign(route, batch, partition)
        if self._sifted is not None:
            self.writes += self._sifted.writes

    def _assign(self, route: Route, batch: AnyBatch, partition: int | None) -> None:
        if partition is not None:
            if not 0 <= partition < route.partitions:
                raise UnknownPartition(route.topic, partition)
        elif route.partitions == 1 or not len(batch):
            partition = 0
        elif batch.keys is None:
            partition = route.next_turn()
        else:
            batch = _listed(batch)
            assigned = assign(batch, route.partitions, route.next_turn())
            if len(assigned) > 1:
                self.assigned = assigned
            partition = next(iter(assigned))
        self.partition = partition
        if not len(batch):
            self.writes = []
        elif self.assigned is None:
            self.writes = [Write(route.topic, partition, batch)]
        else:
            self.writes = [Write(route.topic, place, pick(_listed(batch), indexes)) for place, indexes in self.assigned.items()]

    def partitions(self, count: int) -> list[int]:
        """Return the partition of each of the batch's `count` records; -1 for the dead letters."""
        if self._sifted is not None:
            kept = self._kept_partitions(len(self._sifted.kept))
            return self._sifted.weave(kept, NOWHERE[0])
        return self._kept_partitions(count)

    def _kept_partitions(self, count: int) -> list[int]:
        if self.assigned is None:
            return [self.partition] * count
        places = [0] * count
        for place, indexes in self.assigned.items():
            for index in indexes:
                places[index] = place
        return places

    def check_again(self, route: Route) -> None:
        """Check the records again: the topic's rule may have changed. Raises `InvalidRecord`."""
        if route.rule is None or route.rule is self.rule:
            return
        for write in self.writes:
            if write.topic == route.topic and isinstance(write.batch, (RecordBatch, ColumnBatch)):
                route.rule.sift(_listed(write.batch), Divert.NEVER)

    def landed(self, appended: Sequence[Appended]) -> Published:
        """Return the position of the batch. `appended` begins with the results of `writes`."""
        if self._sifted is None:
            return self._landed(appended)
        kept = self._landed(appended) if self._sifted.kept else None
        places = [] if kept is None else [kept.placement(index) for index in range(kept.count)]
        placements = self._sifted.weave(places, NOWHERE)
        return Published(*placements[0], len(placements), appended[0].timestamp, placements)

    def _landed(self, appended: Sequence[Appended]) -> Published:
        first = appended[0]
        if self.assigned is None:
            return Published(self.partition, first.base_offset, first.count, first.timestamp)
        placements = [(0, 0)] * sum(map(len, self.assigned.values()))
        for (place, indexes), answer in zip(self.assigned.items(), appended, strict=False):
            for offset, index in enumerate(indexes, answer.base_offset):
                placements[index] = (place, offset)
        return Published(self.partition, first.base_offset, len(placements), first.timestamp, placements)


class Publisher:
    """Entry point of all publishes. Counts what is staged and unresolved, so that a drain can wait for it.

    `check_may` raises `NotAuthorized` unless the principal may publish to the topic.
    """

    def __init__(
        self,
        engine: Engine,
        check_may: Callable[[Principal, str], None],
        find: Callable[[str], Topic],
        clock: Clock,
        rules: Callable[[str], Rule | None] = lambda topic: None,
        meters: Meters | None = None,
    ) -> None:
        self._engine = engine
        self.meters = meters or Meters(lambda: 0.0)
        self.tracer: Tracer | None = None
        self.check_may = check_may
        self._find = find
        self._clock = clock
        self._rules = rules
        self._routes: dict[str, Route] = {}
        self._allowed: dict[tuple[Principal, str], Route] = {}
        self._draining = False
        self._staged = 0
        self._drained: asyncio.Future[None] | None = None

    def publish(self, who: Principal, topic: str, batch: AnyBatch, partition: int | None, ack: Ack | None) -> asyncio.Future[Published]:
        route = self._allowed.get((who, topic)) or self.route(who, topic)
        placing = Placing(route, batch, partition)
        traced = None if self.tracer is None else self.tracer.publish(topic, who.protocol, batch)
        staged = self._engine.append(placing.writes, ack=ack)
        if traced is not None:
            staged.add_done_callback(traced)
        self._staged += 1
        answer: asyncio.Future[Published] = staged.get_loop().create_future()
        meter = route.meters.get(who.protocol)
        if meter is None:
            meter = route.meters[who.protocol] = self.meters.meter(topic, who.protocol)
        staged.add_done_callback(partial(self._answer, answer, placing, meter, who.protocol, self.meters.ticks()))
        return answer

    def append(self, writes: Sequence[Write], ack: Ack | None = None, *, urgent: bool = False) -> asyncio.Future[list[Appended]]:
        """Append and register the append, so that a drain waits for it."""
        staged = self._engine.append(writes, ack=ack, urgent=urgent)
        self._staged += 1
        staged.add_done_callback(self._landed)
        return staged

    def known_route(self, who: Principal, topic: str) -> Route:
        """Return the cached route, or look it up as `route` does."""
        return self._allowed.get((who, topic)) or self.route(who, topic)

    def route(self, who: Principal, topic: str) -> Route:
        """Look up the route and check the permission. Raises `Unavailable`, `NotAuthorized`, `UnknownTopic`."""
        self.check_open()
        self.check_may(who, topic)
        if len(self._allowed) >= _ROUTES_MAX:
            self._allowed.clear()
        route = self._allowed[who, topic] = self.own_route(topic)
        return route

    def own_route(self, topic: str) -> Route:
        """Return the route for records that the broker itself publishes. Raises `UnknownTopic`."""
        route = self._routes.get(topic)
        if route is None:
            route = self._routes[topic] = Route(self._find(topic), self._clock, self._rules(topic))
        return route

    @property
    def staged(self) -> int:
        """Appends that wait for the disk."""
        return self._staged

    def check_open(self) -> None:
        if self._draining:
            raise Unavailable("the broker is draining")

    def forget(self, topic: str | None = None) -> None:
        """Drop the cached routes of a topic, or all of them (None) after the rules changed."""
        self._allowed.clear()
        if topic is not None:
            self._routes.pop(topic, None)

    async def drain(self) -> None:
        """Reject new publishes and wait for the staged ones."""
        self._draining = True
        self._allowed.clear()
        if self._staged:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained

    def _answer(
        self,
        answer: asyncio.Future[Published],
        placing: Placing,
        meter: Meter,
        protocol: str,
        began: float,
        staged: asyncio.Future[list[Appended]],
    ) -> None:
        self._landed(staged)
        error = staged.exception()
        if error is None:
            meter.published(placing.topic, placing.writes, self.meters.ticks() - began)
        elif isinstance(error, BrokerError):
            self.meters.refuse(protocol, error.code)
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(placing.landed(staged.result()))

    def _landed(self, staged: asyncio.Future[list[Appended]]) -> None:
        self._staged -= 1
        if self._drained is not None and self._staged == 0 and not self._drained.done():
            self._drained.set_result(None)
