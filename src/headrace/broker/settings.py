"""Settings of the broker, and timers, which are arguments so that tests control the time. Fixed limits are in `limits.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from headrace import limits
from headrace.engine.contract import TopicConfig


class Timer(Protocol):
    """Return type of `asyncio.loop.call_later`; only `cancel` is used."""

    def cancel(self) -> None: ...


Later: TypeAlias = Callable[[float, Callable[[], object]], Timer]
"""Seconds from now and a callback: the signature of `asyncio.loop.call_later`."""

Clock: TypeAlias = Callable[[], int]
"""Unix time in milliseconds."""


@dataclass(frozen=True, slots=True)
class SpillSizes:
    """Sizes of spilled records. Only tests change them."""

    write_bytes: int = 32 * limits.MIB
    """Bytes per write: at most one flush of the log, so that other writers do not wait long."""
    chunk_bytes: int = 16 * limits.MIB
    """Bytes of one chunk."""
    log_bytes: int = 256 * limits.MIB
    """Size at which a stage log is full."""
    step_bytes: int = 32 * limits.MIB
    """Bytes per append of a publication of several appends."""


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Every field has a default that suits one machine."""

    auto_create: bool = True
    """Whether publishing to or reading from a missing topic creates it."""
    auto_create_partitions: int = 1
    topic_defaults: TopicConfig = field(default_factory=TopicConfig)
    groups_max: int = limits.GROUPS_MAX
    producers_max: int = 100_000
    """Maximum number of idempotent producers, counted once for each partition they write to."""
    producer_idle_ms: int = 7 * 24 * 3600 * 1000
    """Idle time after which an idempotent producer is forgotten."""
    waiting_fetches_max: int = 100_000
    transactions_open_max: int = limits.TRANSACTIONS_OPEN_MAX
    transactions_bytes_max: int = 4 * limits.TRANSACTION_BYTES_MAX
    """Memory of all open transactions together."""
    delayed_max: int = limits.DELAYED_MAX
    delayed_bytes_max: int = limits.DELAYED_BYTES_MAX
    """Maximum number and total bytes of delayed messages."""
    stages_max: int = limits.STAGES_MAX
    stages_memory_bytes: int = limits.STAGED_MEMORY_BYTES_MAX
    """Maximum number of stages of exactly-once writers, and their memory together."""
    publication_bytes: int = limits.TRANSACTION_BYTES_MAX
    """Maximum publication in one append; a larger one is rolled forward."""
    spill_sizes: SpillSizes = field(default_factory=SpillSizes)
    stage_idle_ms: int = limits.STAGE_IDLE_MS_MAX
    """Idle time of a writer after which its stages are dropped."""
    writers_max: int = limits.WRITERS_MAX
    writer_idle_ms: int = limits.WRITER_IDLE_MS
    """Maximum number of exactly-once writers, and how long one is remembered after its last publication."""
    sweep_every_ms: int = 1_000
    """Interval at which expired records are moved to the dead letters, for topics that enable it."""
    settlement_commit_ms: int = 100
    """Maximum delay of the commit of a group with members. The delay joins many steps in one commit."""
    expire_every_ms: int = 60_000
    """Interval of the search for idle producers."""


def loop_later(seconds: float, callback: Callable[[], object]) -> Timer:
    """Set a timer of the running loop: the usual `Later`."""
    return asyncio.get_running_loop().call_later(seconds, callback)
