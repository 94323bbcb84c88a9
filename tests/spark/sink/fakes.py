"""Fake broker for tests of the writers: it stages, publishes and drops like the real one, and fails on demand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructType

from headrace.errors import StaleEpoch, Unavailable, UnknownStage, UnknownTopic
from headrace.flight.client import Publication, StageSize
from headrace.spark.publishing import TaskId

QUERY, EPOCH = "11111111-1111-4111-8111-111111111111", "22222222-2222-4222-8222-222222222222"
SCHEMA = StructType().add("key", StringType()).add("value", StringType()).add("topic", StringType()).add("partition", IntegerType())
VALUES = StructType().add("value", BinaryType())


def rows(*values: bytes | str | None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": pa.array(values)})


def task(*, batch: int | None = 0, partition: int = 0, attempt: int = 0, epoch: str = EPOCH) -> TaskId:
    return TaskId(QUERY if batch is not None else "", epoch if batch is not None else "", batch, partition, attempt)


@dataclass
class FakeBroker:
    """Replacement of `FlightClient`."""

    topics: set[str] = field(default_factory=lambda: {"orders"})
    auto_create: bool = False
    staged: dict[str, tuple[str, int, list[dict[str, Any]]]] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)
    versions: dict[str, int] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    log: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    """Names of methods whose next call fails; with a `!` the call is executed and its reply is lost."""

    def _call(self, method: str) -> bool:
        """Count a call; return whether its reply is lost."""
        self.calls.append(method)
        if method in self.trouble:
            self.trouble.remove(method)
            raise Unavailable(f"{method}: no answer")
        if f"{method}!" in self.trouble:
            self.trouble.remove(f"{method}!")
            return True
        return False

    def ensure_topic(self, name: str) -> None:
        self._call("ensure_topic")
        if name not in self.topics and not self.auto_create:
            raise UnknownTopic(name)
        self.topics.add(name)

    def stage(
        self, handle: str, batches: Iterable[pa.RecordBatch], *, topic: str | None, writer: str, epoch: str = "", order: int = 0
    ) -> StageSize:
        taken: list[dict[str, Any]] = []
        for batch in batches:
            taken += [{"topic": topic, **row} for row in batch.to_pylist()]
            self._call("batch")
        if handle in self.dead:
            raise UnknownStage(handle)
        if self._call("stage"):
            raise Unavailable("stage: no answer")
        assert handle not in self.staged, "no two attempts share a handle"
        self.staged[handle] = (writer, order, taken)
        return StageSize(len(taken), 0)

    def publish(self, writer: str, version: int, handles: Sequence[str], *, epoch: str = "", remember_ms: int = 0) -> Publication:
        lost = self._call("publish")
        if epoch in self.stale:
            raise StaleEpoch(writer=writer, epoch=epoch, current="another")
        answer = self._publish(writer, version, handles)
        if lost:
            raise Unavailable("publish: no answer")
        return answer

    def _publish(self, writer: str, version: int, handles: Sequence[str]) -> Publication:
        if version <= self.versions.get(writer, -1):
            self.drop(handles)
            return Publication(writer, version, True, 0)
        for handle in handles:
            if handle not in self.staged or self.staged[handle][0] != writer:
                raise UnknownStage(handle)
        found = sorted((self.staged.pop(handle) for handle in handles), key=lambda stage: stage[1])
        published = [row for _, _, taken in found for row in taken]
        self.log += published
        self.versions[writer] = version
        return Publication(writer, version, False, len(published))

    def drop(self, handles: Sequence[str]) -> int:
        self._call("drop")
        self.dead.update(handles)
        return sum(self.staged.pop(handle, None) is not None for handle in handles)

    def last_version(self, writer: str) -> int | None:
        self._call("last_version")
        return self.versions.get(writer)

    def restart(self) -> None:
        """Drop staged rows and keep published rows."""
        self.staged.clear()

    @property
    def values(self) -> list[object]:
        return [row["value"] for row in self.log]
