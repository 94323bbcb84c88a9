"""Names and settings of topics, in our terms and in Kafka's.

A topic NAME is the Kafka topic PREFIX + NAME. The internal topic `__NAME` is PREFIX + `__headrace_` + NAME. Other Kafka topics whose name
begins with `__` belong to Kafka or to other systems and are not served.

| ours | Kafka's |
|---|---|
| `cleanup` | `cleanup.policy`; a topic with `compact,delete` is served as `compact` |
| `retention_ms`, `retention_bytes` | `retention.ms`, `retention.bytes`; 0 is -1 |
| `segment_bytes` | `segment.bytes`, from 1 MiB to 2 GiB - 1 |
| `tombstone_retention_ms` | `delete.retention.ms` |
| `compress` | `compression.type`: `zstd`, otherwise `producer` |
| `ack`, `ttl_ms`, `dead_letter_expired` | Kafka has no such setting: the table `__topics` holds them |
| `encrypt` | refused |
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.engine.contract import Cleanup, TopicConfig
from headrace.errors import InvalidRequest, InvalidTopicName
from headrace.limits import HEADERS_BYTES_MAX, KEY_BYTES_MAX, KIB, MIB, VALUE_BYTES_MAX

INTERNAL: Final = "__"
_OURS: Final = "__headrace_"
_VALID: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")
_SEGMENT_BYTES_MIN: Final = 1 * MIB
_SEGMENT_BYTES_MAX: Final = (1 << 31) - 1
RECORD_BYTES_MAX: Final = VALUE_BYTES_MAX + KEY_BYTES_MAX + HEADERS_BYTES_MAX + 64 * KIB
"""`max.message.bytes` of the topics that we create: the largest record that Headrace accepts, with its framing."""
CONFIG_NAMES: Final = (
    "cleanup.policy",
    "retention.ms",
    "retention.bytes",
    "segment.bytes",
    "delete.retention.ms",
    "compression.type",
    "max.message.bytes",
    "min.insync.replicas",
    "message.timestamp.type",
)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of topics under a prefix."""

    prefix: str

    def to_kafka(self, name: str) -> str:
        """Return the name of the Kafka topic. Raises `InvalidTopicName` for a name that Kafka does not allow."""
        found = self.prefix + (_OURS + name.removeprefix(INTERNAL) if name.startswith(INTERNAL) else name)
        if not _VALID.fullmatch(found) or found in (".", ".."):
            raise InvalidTopicName(
                f"topic name {name[:80]!r} is not possible in Kafka: "
                f"expected up to {249 - len(self.prefix)} letters, digits, '.', '_' or '-'"
            )
        return found

    def from_kafka(self, kafka_name: str) -> str | None:
        """Return our name; None for a topic that is not served."""
        if not kafka_name.startswith(self.prefix):
            return None
        name = kafka_name.removeprefix(self.prefix)
        if name.startswith(_OURS):
            return INTERNAL + name.removeprefix(_OURS)
        return None if not name or name.startswith(INTERNAL) or kafka_name.startswith(INTERNAL) else name


def to_kafka_config(config: TopicConfig) -> dict[str, str]:
    """Return the Kafka settings of a topic. Raises `InvalidRequest` for a setting that Kafka cannot keep."""
    if config.encrypt:
        raise InvalidRequest("encrypt: the Kafka engine does not encrypt topics; expected false or no value")
    if not _SEGMENT_BYTES_MIN <= config.segment_bytes <= _SEGMENT_BYTES_MAX:
        raise InvalidRequest(f"segment_bytes: Kafka allows {_SEGMENT_BYTES_MIN} to {_SEGMENT_BYTES_MAX} bytes, got {config.segment_bytes}")
    return {
        "cleanup.policy": config.cleanup.value,
        "retention.ms": str(config.retention_ms or -1),
        "retention.bytes": str(config.retention_bytes or -1),
        "segment.bytes": str(config.segment_bytes),
        "delete.retention.ms": str(config.tombstone_retention_ms),
        "compression.type": "zstd" if config.compress else "producer",
        "max.message.bytes": str(RECORD_BYTES_MAX),
    }


def from_kafka_config(found: Mapping[str, str]) -> TopicConfig:
    """Return our settings of a Kafka topic, without those of the table `__topics`."""
    return TopicConfig(
        cleanup=Cleanup.COMPACT if "compact" in found.get("cleanup.policy", "") else Cleanup.DELETE,
        retention_ms=max(0, int(found.get("retention.ms", -1))),
        retention_bytes=max(0, int(found.get("retention.bytes", -1))),
        segment_bytes=int(found.get("segment.bytes", TopicConfig().segment_bytes)),
        tombstone_retention_ms=int(found.get("delete.retention.ms", TopicConfig().tombstone_retention_ms)),
        compress=found.get("compression.type", "producer") not in ("producer", "uncompressed"),
    )
