"""Fake Flight client with schemas and dead letters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa

from headrace.errors import BrokerError, Unavailable, UnknownSchema, UnknownTopic
from headrace.flight.client import READ_SCHEMA, FlightClient, TopicSchema, TopicState
from headrace.spark.options import Options


@dataclass
class Registry:
    """`versions`: topic → (name, kind, definitions from version 1 on)."""

    versions: dict[str, tuple[str, str, list[bytes]]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    letters: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)
    asked: int = 0
    failure: BrokerError | None = None
    away: int = 0
    """Number of moves to the dead letters that fail because the broker is unavailable."""

    def topics(self) -> list[str]:
        return sorted({*self.versions, *self.names})

    def describe(self, topics: Sequence[str]) -> dict[str, TopicState]:
        for name in topics:
            if name not in self.topics():
                raise UnknownTopic(name)
        return {name: TopicState(name, (), 0, "delete") for name in topics}

    def require(self, topic: str, kind: str, *definitions: object, name: str = "s") -> None:
        texts = [one if isinstance(one, bytes) else json.dumps(one).encode() for one in definitions]
        self.versions[topic] = (name, kind, texts)

    def schema(self, topic: str, version: int = 0) -> TopicSchema | None:
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        if topic not in self.versions:
            return None
        name, kind, texts = self.versions[topic]
        number = version or len(texts)
        if number > len(texts):
            raise UnknownSchema(name, number)
        others = (*reversed(texts[: number - 1]), *texts[number:])
        return TopicSchema(name, number, kind, texts[number - 1], others=others)

    def dead_letters(self, topic: str, batch: pa.RecordBatch) -> int:
        if self.away:
            self.away -= 1
            raise Unavailable("away")
        self.letters.append((topic, batch.to_pylist()))
        return int(batch.num_rows)

    @property
    def client(self) -> FlightClient:
        return cast(FlightClient, self)


def options(**more: str) -> Options:
    """Keyword names have `_` for `.`."""
    given = {"servers": "127.0.0.1:1", "subscribe": "t"} | {name.replace("_", "."): value for name, value in more.items()}
    return Options(given)


def rows(values: Sequence[bytes | None], columns: Sequence[str] = READ_SCHEMA.names) -> pa.RecordBatch:
    """A record batch as the broker sends it: partition 3, from offset 100 on."""
    count = len(values)
    made = {
        "key": [b"k"] * count,
        "value": list(values),
        "topic": ["t"] * count,
        "partition": [3] * count,
        "offset": list(range(100, 100 + count)),
        "timestamp": [1_700_000_000_000_000] * count,
        "timestampType": [1] * count,
        "headers": [[{"key": "h", "value": b"1"}]] * count,
    }
    fields = [READ_SCHEMA.field(name) for name in columns]
    return pa.RecordBatch.from_arrays([pa.array(made[one.name], one.type) for one in fields], schema=pa.schema(fields))
