"""Publishing: checks a batch of records, assigns partitions and appends it.

`Publisher.publish` is on the hot path (thousands of batches per second). It looks up what it needs about a topic and a principal once
and keeps it as a `Route` until the topic or the rules change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from headrace.broker.authorizer import Principal
from headrace.broker.meters import Meter, Meters
from headrace.broker.publishing.gathering import RECORD_BYTES_MAX, Gathering, Place
from headrace.broker.publishing.partitioner import assign, hashes, pick
from headrace.broker.publishing.published import Outcome, Published, PublishedEach
from headrace.broker.publishing.requirements import NOWHERE, Divert, OnInvalid, Rule
from headrace.broker.settings import Clock
from headrace.broker.tracing import Tracer
from headrace.compiled import mypyc_attr
from headrace.engine.contract import Ack, Appended, AppendedEach, Engine, Placement, Topic, Write
from headrace.errors import AppendUnknown, BrokerError, InvalidRequest, Unavailable, UnknownPartition
from headrace.records import AnyBatch, ColumnBatch, RecordBatch

_ROUTES_MAX: Final = 65_536
_PRINCIPALS_MAX: Final = 1_024
"""Cached routes of a principal, and principals with cached routes."""


@dataclass(frozen=True, slots=True)
class ProducerStamp:
    """Id of the producer of a batch and the sequence number of its first record. The following records count up from it."""

    id: str
    sequence: int


@mypyc_attr(allow_interpreted_subclasses=True)
class Route:
    """Cached facts about a topic that a publish needs."""

    __slots__ = ("_clock", "_ttl_ms", "is_plain", "meters", "partitions", "place", "placement", "rule", "topic", "turn")

    def __init__(self, topic: Topic, clock: Clock, rule: Rule | None = None, placement: Placement = Placement.FNV1A) -> None:
        self.placement = placement
        self.topic = topic.name
        self.meters: dict[str, Meter] = {}
        """By protocol, as far as it has published."""
        self.rule = rule
        """Requirement on the topic's records, if there is one."""
        self.partitions = topic.partitions
        self.turn = 0
        self._ttl_ms = topic.config.ttl_ms
        self._clock = clock
        self.is_plain = rule is None and not topic.config.ttl_ms
        """Whether records are written as they are: without a rule to check and an expiry to add."""
        self.place = (topic.name, 0) if topic.partitions == 1 and self.is_plain else None
        """Topic and partition of every record, if there is only one and nothing to check."""

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
            assigned = assign(batch, route.partitions, route.next_turn(), route.placement)
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
            placements = None if first.offsets is None else [(self.partition, offset) for offset in first.offsets]
            return Published(self.partition, first.base_offset, first.count, first.timestamp, placements)
        placements = [(0, 0)] * sum(map(len, self.assigned.values()))
        for (place, indexes), answer in zip(self.assigned.items(), appended, strict=False):
            for number, index in enumerate(indexes):
                placements[index] = (place, answer.offset(number))
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
        self._allowed: dict[Principal, dict[str, Route]] = {}
        self._draining = False
        self._staged = 0
        self._drained: asyncio.Future[None] | None = None
        self.gathering = Gathering(self._append_gathered, self._append_then, self._count_landed, self.meters)

    def publish(self, who: Principal, topic: str, batch: AnyBatch, partition: int | None, ack: Ack | None) -> asyncio.Future[Published]:
        route = self.known_route(who, topic)
        placing = Placing(route, batch, partition)
        traced = None if self.tracer is None else self.tracer.publish(topic, who.protocol, batch)
        self.gathering.send()
        if len(placing.writes) > 1 and not self._engine.capabilities.cheap_atomic_append:
            staged = self._append_each(placing.writes, ack)
        else:
            staged = self._engine.append(placing.writes, ack=ack)
        if traced is not None:
            staged.add_done_callback(traced)
        self._staged += 1
        answer: asyncio.Future[Published] = staged.get_loop().create_future()
        meter = route.meters.get(who.protocol) or self._meter(route, who.protocol)
        staged.add_done_callback(partial(self._answer, answer, placing, meter, who.protocol, self.meters.ticks()))
        return answer

    def publish_one(self, who: Principal, topic: str, value: bytes, key: bytes | None, partition: int | None) -> Outcome:
        route = self.known_route(who, topic)
        size_bytes = len(value) if key is None else len(value) + len(key)
        if not route.is_plain or self.tracer is not None or size_bytes > RECORD_BYTES_MAX:
            return self.publish(who, topic, RecordBatch([value], None if key is None else [key]), partition, None)
        place = route.place
        if place is None or partition:
            if partition is None:
                partition = route.next_turn() if key is None else hashes([key], route.placement)[0] % route.partitions
            elif not 0 <= partition < route.partitions:
                raise UnknownPartition(topic, partition)
            place = (route.topic, partition)
        protocol = who.protocol
        return self.gathering.add(place, value, key, route.meters.get(protocol) or self._meter(route, protocol), protocol)

    def _meter(self, route: Route, protocol: str) -> Meter:
        meter = route.meters[protocol] = self.meters.meter(route.topic, protocol)
        return meter

    def _append_gathered(self, writes: Sequence[Write], *, owned: bool) -> asyncio.Future[list[Appended]]:
        staged = self._engine.append(writes, owned=owned)
        self._staged += 1
        return staged

    def _append_then(self, write: Write, done: Callable[[list[Appended] | BaseException], None]) -> None:
        self._engine.append_then(write, done)
        self._staged += 1

    def publish_each(
        self, who: Principal, topics: Sequence[str], values: Sequence[bytes], keys: Sequence[bytes | None] | None
    ) -> asyncio.Future[PublishedEach] | None:
        routes: dict[str, Route] = self._allowed.get(who, {})
        places: list[Place] = []
        partitions = [0] * len(topics)
        for topic in topics:
            route = routes.get(topic) or self.known_route(who, topic)
            place = route.place
            if place is None:
                spread = self._spread({topic: self.known_route(who, topic) for topic in set(topics)}, topics, keys)
                if spread is None:
                    return None
                places, partitions = spread, [partition for _, partition in spread]
                break
            places.append(place)
        self.gathering.send()
        staged = self._engine.append_each(places, values, keys)
        self._staged += 1
        answer: asyncio.Future[PublishedEach] = staged.get_loop().create_future()
        sizes, began = list(map(len, values)), self.meters.ticks()
        staged.add_done_callback(partial(self._answer_each, answer, topics, partitions, sizes, who.protocol, began))
        return answer

    def _spread(self, routes: dict[str, Route], topics: Sequence[str], keys: Sequence[bytes | None] | None) -> list[tuple[str, int]] | None:
        """Choose the partition of each record. None: a topic has a rule or an expiry, or keys are placed by another hash."""
        named = {topic: routes[topic] for topic in topics}
        if not all(route.is_plain and (keys is None or route.placement is Placement.FNV1A) for route in named.values()):
            return None
        turns = {topic: route.next_turn() for topic, route in named.items()}
        places = [(topic, turns[topic]) for topic in topics]
        if keys is not None:
            keyed = [index for index, key in enumerate(keys) if key is not None]
            for index, value in zip(keyed, hashes([keys[index] or b"" for index in keyed]), strict=True):
                places[index] = (topics[index], value % named[topics[index]].partitions)
        return places

    def _answer_each(
        self,
        answer: asyncio.Future[PublishedEach],
        topics: Sequence[str],
        partitions: list[int],
        sizes: list[int],
        protocol: str,
        began: float,
        staged: asyncio.Future[AppendedEach],
    ) -> None:
        self._landed(staged)
        error = staged.exception()
        if answer.done():
            return
        if error is not None:
            answer.set_exception(error)
        else:
            done = staged.result()
            self.meters.published_each(topics, sizes, protocol, done.failed, self.meters.ticks() - began)
            answer.set_result(PublishedEach(partitions, done.offsets, done.timestamp, done.failed))

    def _append_each(self, writes: Sequence[Write], ack: Ack | None) -> asyncio.Future[list[Appended]]:
        """Append each write by itself: a publish promises atomicity only to idempotent producers and transactions. If some writes fail
        and others do not, the outcome is unknown."""
        parts = [self._engine.append([write], ack=ack) for write in writes]
        answer: asyncio.Future[list[Appended]] = asyncio.get_running_loop().create_future()

        def landed(gathered: asyncio.Future[list[list[Appended] | BaseException]]) -> None:
            found = gathered.result()
            errors = [part for part in found if isinstance(part, BaseException)]
            if answer.done():
                return
            if not errors:
                answer.set_result([appended for part in found if not isinstance(part, BaseException) for appended in part])
            elif len(errors) == len(found):
                answer.set_exception(errors[0])
            else:
                answer.set_exception(AppendUnknown(f"{len(found) - len(errors)} of {len(found)} partitions were written: {errors[0]}"))

        asyncio.gather(*parts, return_exceptions=True).add_done_callback(landed)
        return answer

    def append(self, writes: Sequence[Write], ack: Ack | None = None, *, urgent: bool = False) -> asyncio.Future[list[Appended]]:
        """Append and register the append, so that a drain waits for it."""
        self.gathering.send()
        staged = self._engine.append(writes, ack=ack, urgent=urgent)
        self._staged += 1
        staged.add_done_callback(self._landed)
        return staged

    def known_route(self, who: Principal, topic: str) -> Route:
        """Return the cached route, or look it up as `route` does."""
        allowed = self._allowed.get(who)
        return (allowed and allowed.get(topic)) or self.route(who, topic)

    def route(self, who: Principal, topic: str) -> Route:
        """Look up the route and check the permission. Raises `Unavailable`, `NotAuthorized`, `UnknownTopic`."""
        self.check_open()
        self.check_may(who, topic)
        allowed = self._allowed.setdefault(who, {})
        if len(allowed) >= _ROUTES_MAX or len(self._allowed) >= _PRINCIPALS_MAX:
            self._allowed = {who: (allowed := {})}
        route = allowed[topic] = self.own_route(topic)
        return route

    def own_route(self, topic: str) -> Route:
        """Return the route for records that the broker itself publishes. Raises `UnknownTopic`."""
        route = self._routes.get(topic)
        if route is None:
            route = self._routes[topic] = Route(self._find(topic), self._clock, self._rules(topic), self._engine.capabilities.placement)
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
        self.gathering.send()
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

    def _landed(self, staged: asyncio.Future[Any]) -> None:
        self._count_landed()

    def _count_landed(self) -> None:
        self._staged -= 1
        if self._drained is not None and self._staged == 0 and not self._drained.done():
            self._drained.set_result(None)
