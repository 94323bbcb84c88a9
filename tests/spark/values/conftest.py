"""Fixtures for typed reads: schemas and dead letters of the shared broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pytest

from headrace.clients.flymq.advanced import DeadLetter
from headrace.clients.flymq.client import FlyMqClient
from headrace.flight.client import FlightClient
from tests.spark.serving import FlightBroker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")


@dataclass
class SchemaAdmin:
    """Operate the registry through the FlyMQ protocol."""

    broker: FlightBroker
    client: FlightClient

    def register(self, name: str, kind: str, definition: object, *, compatibility: str = "none") -> int:
        text = definition if isinstance(definition, bytes) else json.dumps(definition).encode()
        return self._ask(lambda client: client.register_schema(name, kind, text, compatibility=compatibility))

    def require(self, topic: str, name: str) -> None:
        self._ask(lambda client: client.require_schema(topic, name))

    def dead_letters(self, topic: str) -> list[DeadLetter]:
        return self._ask(lambda client: client.dead_letters(topic, records_max=1_000))

    def put(self, topic: str, *values: bytes | None, partition: int = 0) -> None:
        self.client.append(topic, [pa.record_batch({"value": pa.array(values, pa.binary())})], partition=partition)

    def _ask(self, work: Callable[[FlyMqClient], Awaitable[T]]) -> T:
        async def ask() -> T:
            host, _, port = self.broker.tcp.rpartition(":")
            async with await FlyMqClient.connect(host, int(port)) as client:
                return await work(client)

        return asyncio.run(ask())


@pytest.fixture
def schema_admin(broker: FlightBroker, flight_client: FlightClient) -> SchemaAdmin:
    return SchemaAdmin(broker, flight_client)


Load = Callable[..., "DataFrame"]


@pytest.fixture
def load(spark: SparkSession, broker: FlightBroker) -> Load:
    """Return `load(topic, **{"value.format": "json"})`, a batch read with an optional `schema=`."""

    def load(topic: str, schema: Any = None, **options: str) -> DataFrame:
        reader = spark.read.format("headrace").options(servers=broker.address, subscribe=topic, **options)
        return (reader if schema is None else reader.schema(schema)).load()

    return load
