"""Offsets in the JSON of Spark's Kafka source: `{"orders":{"0":23,"1":7}}`, always in the same order.

Spark compares offsets as strings. The same numbers in another order would look like progress and start empty batches in a loop. So topics
are sorted by name and partitions by number, and no other module writes this JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from headrace.errors import ConfigError

TopicPartition: TypeAlias = tuple[str, int]
"""A topic and one of its partitions."""
Offsets: TypeAlias = dict[TopicPartition, int]
"""The next offset to read, by partition."""

EARLIEST: Final = -2
LATEST: Final = -1


def to_json(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[str, int]]:
    """Encode offsets for Spark."""
    nested: dict[str, dict[str, int]] = {}
    for topic, partition in sorted(offsets):
        nested.setdefault(topic, {})[str(partition)] = offsets[topic, partition]
    return nested


def from_json(nested: Mapping[str, Mapping[str, int]]) -> Offsets:
    """Decode offsets from Spark or from a checkpoint."""
    return {(topic, int(partition)): offset for topic, offsets in nested.items() for partition, offset in offsets.items()}


def nested(offsets: Mapping[TopicPartition, int]) -> dict[str, dict[int, int]]:
    """Group offsets by topic, as the Flight endpoint expects them."""
    by_topic: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in offsets.items():
        by_topic.setdefault(topic, {})[partition] = offset
    return by_topic


def parse_offsets(option: str, text: str, *, least: int) -> Offsets:
    """Parse numbers by topic and partition from an option. Raises `ConfigError` that names the option."""
    shape = f'option {option}: expected JSON such as {{"orders":{{"0":23,"1":7}}}}'
    document = _parse_json(text, shape)
    offsets: Offsets = {}
    for topic, numbers in document.items():
        if not isinstance(numbers, dict):
            raise ConfigError(f'{shape}, but "{topic}" has {json.dumps(numbers)[:40]}')
        for partition, number in numbers.items():
            if not partition.isascii() or not partition.isdigit():
                raise ConfigError(f'{shape}, but "{topic}" has a partition "{partition}"')
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ConfigError(f'{shape}, but partition {partition} of "{topic}" has {json.dumps(number)[:40]}')
            offsets[topic, int(partition)] = number
    return offsets


def parse_assignment(text: str) -> dict[str, tuple[int, ...]]:
    """Parse `{"orders":[0,1]}`. Raises `ConfigError`."""
    shape = 'option assign: expected JSON such as {"orders":[0,1]}'
    document = _parse_json(text, shape)
    for topic, numbers in document.items():
        whole = isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
        if not whole or not numbers:
            raise ConfigError(f'{shape}, but "{topic}" has {json.dumps(numbers)[:40]}')
    return {topic: tuple(sorted(set(numbers))) for topic, numbers in document.items()}


def _parse_json(text: str, shape: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        raise ConfigError(f"{shape}, not {text[:60]}") from None
    if not isinstance(document, dict) or not document:
        raise ConfigError(f"{shape}, not {text[:60]}")
    return document
