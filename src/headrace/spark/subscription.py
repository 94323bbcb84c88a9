"""Topics and partitions of a query: exactly one of `subscribe`, `subscribePattern` and `assign`."""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.errors import ConfigError, UnknownTopic
from headrace.flight.client import FlightClient, TopicState
from headrace.limits import GROUP_NAME_BYTES_MAX
from headrace.spark.offsets import Offsets, TopicPartition, parse_assignment
from headrace.spark.options import Options

WAYS = ("subscribe", "subscribePattern", "assign")
_DEAD_LETTERS = "dlq"


@dataclass(frozen=True, slots=True)
class Subscription:
    """Topics of one query. For a pattern `names` is empty, because its topics change."""

    names: tuple[str, ...] = ()
    pattern: str = ""
    assigned: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Options) -> Subscription:
        given = [way for way in WAYS if options.text(way)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise ConfigError(f"set exactly one of the options subscribe, subscribePattern and assign; got {found}")
        text = options.text(given[0])
        if given[0] == "assign":
            assigned = parse_assignment(text)
            return cls(names=tuple(sorted(assigned)), assigned=assigned)
        if given[0] == "subscribe":
            names = tuple(sorted({name.strip() for name in text.split(",")} - {""}))
            if not names:
                raise ConfigError("option subscribe names no topic")
            return cls(names=names)
        try:
            re.compile(text)
        except re.error as failure:
            raise ConfigError(f'option subscribePattern: "{text}" is not a regular expression: {failure}') from None
        return cls(pattern=text)

    def __str__(self) -> str:
        return self.pattern or ", ".join(self.names)

    def topics(self, client: FlightClient) -> list[str]:
        """Return the current names of the topics."""
        return [name for name in client.topics() if self.reads(name)] if self.pattern else list(self.names)

    def reads(self, topic: str) -> bool:
        """Return whether the query reads this topic. A pattern matches dead letters only if it contains `dlq`: otherwise a query that moves
        bad records to `orders.dlq` would read them there and move them to `orders.dlq.dlq` without end."""
        if not self.pattern:
            return topic in self.names
        return re.fullmatch(self.pattern, topic) is not None and (not topic.endswith(f".{_DEAD_LETTERS}") or _DEAD_LETTERS in self.pattern)

    def states(self, client: FlightClient) -> dict[str, TopicState]:
        """Return the current states of the topics. Raises `ConfigError` with similar names for a topic that does not exist."""
        names = self.topics(client)
        if not names:
            return {}
        try:
            states = client.describe(names)
        except UnknownTopic as failure:
            raise ConfigError(_unknown(failure.topic, client.topics())) from None
        for topic, partitions in self.assigned.items():
            if partitions[-1] >= len(states[topic].partitions):
                there = len(states[topic].partitions)
                raise ConfigError(f"option assign: topic {topic} has partitions 0 to {there - 1}, but not {partitions[-1]}")
        return states

    def places(self, states: Mapping[str, TopicState]) -> list[TopicPartition]:
        """Return the partitions to read."""
        return [
            (topic, partition)
            for topic, state in states.items()
            for partition in self.assigned.get(topic, range(len(state.partitions)))
            if partition < len(state.partitions)
        ]

    def firsts(self, states: Mapping[str, TopicState]) -> Offsets:
        return {(topic, partition): states[topic].partitions[partition].first for topic, partition in self.places(states)}

    def ends(self, states: Mapping[str, TopicState]) -> Offsets:
        return {(topic, partition): states[topic].partitions[partition].end for topic, partition in self.places(states)}

    def group(self, prefix: str) -> str:
        """Return the group name, such as `spark-headrace-orders`: readable, and the same for every execution of the query."""
        label = self.pattern or ",".join(self.names)
        name = f"{prefix}-{label}"
        if len(name.encode()) > GROUP_NAME_BYTES_MAX or not label.isprintable() or " " in label:
            name = f"{prefix}-{hashlib.blake2b(label.encode(), digest_size=8).hexdigest()}"
        return name


def _unknown(topic: str, known: list[str]) -> str:
    near = difflib.get_close_matches(topic, known, n=3, cutoff=0.5)
    if near:
        return f"there is no topic {topic}; did you mean {' or '.join(near)}?"
    some = ", ".join(sorted(known)[:5])
    return f"there is no topic {topic}" + (
        f"; there are {some}{' and others' if len(known) > 5 else ''}" if known else "; the broker has none"
    )
