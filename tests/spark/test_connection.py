"""Connections of Spark's Python workers."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from headrace.flight.client import Servers
from headrace.spark import connection

HERE = Servers(("127.0.0.1:1",))


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a test freezes, and leave the heap of the tests alone."""
    monkeypatch.setattr(connection, "keep_large_chunks", lambda: True)
    gc.unfreeze()
    connection._clients.clear()
    yield
    gc.unfreeze()
    connection._clients.clear()


@pytest.mark.usefixtures("frozen")
def test_the_first_connection_of_a_worker_leaves_its_modules_out_of_garbage_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.TaskContext.get", object)
    connection.connect(HERE)
    frozen_count = gc.get_freeze_count()
    assert frozen_count > 1_000
    connection.connect(HERE)
    assert gc.get_freeze_count() <= frozen_count


@pytest.mark.usefixtures("frozen")
@pytest.mark.parametrize(("task", "calls"), [(object(), 1), (None, 0)])
def test_the_first_connection_of_a_worker_keeps_the_memory_of_batches(task: object, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: task)
    monkeypatch.setattr(connection, "keep_large_chunks", lambda: kept.append(len(connection._clients)))
    connection.connect(HERE)
    connection.connect(HERE)
    assert kept == [0] * calls, "once, and before the first connection"


@pytest.mark.usefixtures("frozen")
def test_the_garbage_collection_of_the_driver_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pyspark.TaskContext.get", lambda: None)
    connection.connect(HERE)
    assert gc.get_freeze_count() == 0
