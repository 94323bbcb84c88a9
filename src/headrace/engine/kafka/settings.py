"""Settings of the Kafka engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class KafkaSettings:
    """`security` holds keyword arguments of aiokafka's clients: protocol, TLS context and SASL. It may hold a secret, so it has no repr."""

    bootstrap: str
    prefix: str = ""
    """Begins the name of every Kafka topic, group and transactional id that Headrace uses; topics without it are not served."""
    replication: int = 0
    """Replicas of a new topic; 0: the default of the cluster."""
    deadline_ms: int = 10_000
    """Time after which a request that Kafka does not answer fails."""
    refresh_ms: int = 1_000
    """Interval at which topics and offsets that others change are read."""
    is_elected: bool = True
    """Whether the engine waits until Kafka elects it as the owner of the tables. Without it, opening takes the tables from their owner."""
    security: Mapping[str, object] = field(default_factory=dict, repr=False)

    @property
    def coordinator_id(self) -> str:
        """Transactional id of the broker that owns the tables, and the name of the group that elects it."""
        return f"{self.prefix}headrace-coordinator"
