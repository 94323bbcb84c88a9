"""What an operator may choose about the broker. The numbers no operator should pass are in `limits.py`."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace import limits
from headrace.engine.contract import TopicConfig


@dataclass(frozen=True, slots=True)
class SpillSizes:
    """How staged records go to the disk and come back. Nobody has a reason to choose, but tests."""

    write_bytes: int = 32 * limits.MIB
    """What is written at once: no more than a flush of the log, so that nobody else waits for long."""
    piece_bytes: int = 16 * limits.MIB
    """What is planned as one."""
    log_bytes: int = 256 * limits.MIB
    """A stage log takes nothing more when it has this."""
    step_bytes: int = 32 * limits.MIB
    """What one append of a publication holds that takes several."""


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """Every field has a default that suits one machine."""

    auto_create: bool = True
    """Whether a topic that somebody publishes to or reads from comes into being by that."""
    auto_create_partitions: int = 1
    topic_defaults: TopicConfig = field(default_factory=TopicConfig)
    groups_max: int = limits.GROUPS_MAX
    producers_max: int = 100_000
    """Idempotent producers remembered at once, counted once for each partition they write to."""
    producer_idle_ms: int = 7 * 24 * 3600 * 1000
    """An idempotent producer that was silent for so long is forgotten."""
    waiting_fetches_max: int = 100_000
    transactions_open_max: int = limits.TRANSACTIONS_OPEN_MAX
    transactions_bytes_max: int = 4 * limits.TRANSACTION_BYTES_MAX
    """What all open transactions together may hold in memory."""
    delayed_max: int = limits.DELAYED_MAX
    delayed_bytes_max: int = limits.DELAYED_BYTES_MAX
    """Delayed messages that may wait, and what they may hold together."""
    stages_max: int = limits.STAGES_MAX
    stages_memory_bytes: int = limits.STAGED_MEMORY_BYTES_MAX
    """Stages of exactly-once writers, and what they may hold in memory together."""
    publication_bytes: int = limits.TRANSACTION_BYTES_MAX
    """What an exactly-once writer publishes in one append; more than that is rolled forward."""
    spill_sizes: SpillSizes = field(default_factory=SpillSizes)
    stage_idle_ms: int = limits.STAGE_IDLE_MS_MAX
    """A stage is dropped when its writer was silent for so long."""
    writers_max: int = limits.SINK_APPS_MAX
    writer_idle_ms: int = limits.SINK_IDLE_MS
    """Exactly-once writers that are remembered, and for how long after their last publication."""
    sweep_every_ms: int = 1_000
    """How often expired records are moved to the dead letters, where a topic asks for it."""
    settlement_commit_ms: int = 100
    """How long the progress of a settlement queue may wait to be committed together with more of it."""
    expire_every_ms: int = 60_000
    """How often idle producers are looked for."""
