"""Catalog of topics and the logs of their partitions, stored in log 0, a compacted log.

| key | value | meaning |
|---|---|---|
| `topic:NAME` | `{"logs": [3, 4], "config": {…}, "internal": false}` | partition 0 of NAME is log 3, partition 1 is log 4 |
| `topic:NAME` | tombstone | the topic does not exist |
| `deleted:LOG` | `{"logs": [3, 4]}` | these logs are to be removed; the next start completes a removal that a crash interrupted |
| `deleted:LOG` | tombstone | they are removed |
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Final

import msgspec

from headrace.engine.contract import Ack, Cleanup, Topic, TopicConfig
from headrace.records import Batch, RecordBatch
from headrace.storage.partition import LogOptions

CATALOG_LOG: Final = 0
CATALOG_SEGMENT_BYTES: Final = 8 * 1024 * 1024
_TOPIC, _DELETED = b"topic:", b"deleted:"
_HOUR_MS: Final = 3600 * 1000


@dataclass(slots=True)
class Entry:
    """A topic and the logs of its partitions."""

    topic: Topic
    logs: list[int]


@dataclass(slots=True)
class Catalog:
    """In-memory state of the catalog."""

    entries: dict[str, Entry] = field(default_factory=dict)
    deleted: dict[int, list[int]] = field(default_factory=dict)
    """Logs still to be removed, by the first of them."""

    def apply(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            for record in batch.records():
                assert record.key is not None, "every catalog record has a key"
                self._apply(record.key, record.value)

    def _apply(self, key: bytes, value: bytes | None) -> None:
        if key.startswith(_TOPIC):
            name = key.removeprefix(_TOPIC).decode()
            if value is None:
                self.entries.pop(name, None)
            else:
                self.entries[name] = _decode_entry(name, value)
        elif key.startswith(_DELETED):
            first = int(key.removeprefix(_DELETED))
            if value is None:
                self.deleted.pop(first, None)
            else:
                self.deleted[first] = msgspec.json.decode(value, type=dict[str, list[int]])["logs"]


def put_record(entry: Entry) -> RecordBatch:
    return RecordBatch([_encode_entry(entry)], [_TOPIC + entry.topic.name.encode()])


def delete_records(entry: Entry) -> RecordBatch:
    """Return the records that free the name and list the logs to remove, for one append."""
    note = msgspec.json.encode({"logs": entry.logs})
    return RecordBatch([None, note], [_TOPIC + entry.topic.name.encode(), _DELETED + str(entry.logs[0]).encode()])


def removed_record(first: int) -> RecordBatch:
    return RecordBatch([None], [_DELETED + str(first).encode()])


def log_options(config: TopicConfig, *, has_key: bool) -> LogOptions:
    return LogOptions(
        segment_bytes=config.segment_bytes,
        compress=config.compress,
        encrypt=has_key if config.encrypt is None else config.encrypt,
        compact=config.cleanup is Cleanup.COMPACT,
        retention_ms=config.retention_ms,
        retention_bytes=config.retention_bytes,
        tombstone_retention_ms=config.tombstone_retention_ms,
        expired_keep_ms=_HOUR_MS if config.dead_letter_expired else 0,
    )


def _encode_entry(entry: Entry) -> bytes:
    return msgspec.json.encode({"logs": entry.logs, "config": asdict(entry.topic.config), "internal": entry.topic.internal})


class _StoredConfig(msgspec.Struct):
    """Stored configuration. Missing settings take their default, unknown ones are ignored."""

    ack: Ack = Ack.DURABLE
    cleanup: Cleanup = Cleanup.DELETE
    retention_ms: int = 0
    retention_bytes: int = 0
    segment_bytes: int = TopicConfig().segment_bytes
    tombstone_retention_ms: int = TopicConfig().tombstone_retention_ms
    ttl_ms: int = 0
    dead_letter_expired: bool = False
    compress: bool = False
    encrypt: bool | None = None


class _StoredEntry(msgspec.Struct):
    logs: list[int]
    config: _StoredConfig
    internal: bool = False


def _decode_entry(name: str, value: bytes) -> Entry:
    stored = msgspec.json.decode(value, type=_StoredEntry)
    config = TopicConfig(**msgspec.structs.asdict(stored.config))
    return Entry(Topic(name, len(stored.logs), config, stored.internal), stored.logs)
