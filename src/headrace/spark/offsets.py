"""Offsets as Spark keeps them: the JSON of the Kafka source, `{"orders":{"0":23,"1":7}}`, always in the same order.

Spark compares offsets as texts. The same numbers in another order would look like progress and start a batch of nothing, again and
again; so topics are sorted by name and partitions by number, and nothing else ever writes this JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from headrace.errors import ConfigError

Place: TypeAlias = tuple[str, int]
"""A topic and one of its partitions."""
Offsets: TypeAlias = dict[Place, int]
"""For each place the next offset to read."""

EARLIEST: Final = -2
LATEST: Final = -1


def to_json(offsets: Mapping[Place, int]) -> dict[str, dict[str, int]]:
    """What a reader answers to Spark."""
    nested: dict[str, dict[str, int]] = {}
    for topic, partition in sorted(offsets):
        nested.setdefault(topic, {})[str(partition)] = offsets[topic, partition]
    return nested


def from_json(nested: Mapping[str, Mapping[str, int]]) -> Offsets:
    """What Spark hands back, from a reader's answer or from a checkpoint."""
    return {(topic, int(partition)): offset for topic, offsets in nested.items() for partition, offset in offsets.items()}


def nested(offsets: Mapping[Place, int]) -> dict[str, dict[int, int]]:
    """By topic and partition, as the Flight endpoint wants it."""
    by_topic: dict[str, dict[int, int]] = {}
    for (topic, partition), offset in offsets.items():
        by_topic.setdefault(topic, {})[partition] = offset
    return by_topic


def parse_offsets(option: str, text: str, *, least: int) -> Offsets:
    """Numbers by topic and partition, as a user writes them. Raises `ConfigError` that names the option."""
    shape = f'option {option}: JSON such as {{"orders":{{"0":23,"1":7}}}} is expected'
    document = _parse_json(text, shape)
    offsets: Offsets = {}
    for topic, numbers in document.items():
        if not isinstance(numbers, dict):
            raise ConfigError(f'{shape}, and "{topic}" has {json.dumps(numbers)[:40]}')
        for partition, number in numbers.items():
            if not partition.isascii() or not partition.isdigit():
                raise ConfigError(f'{shape}, and "{topic}" has a partition "{partition}"')
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                raise ConfigError(f'{shape}, and partition {partition} of "{topic}" has {json.dumps(number)[:40]}')
            offsets[topic, int(partition)] = number
    return offsets


def parse_assignment(text: str) -> dict[str, tuple[int, ...]]:
    """`{"orders":[0,1]}`. Raises `ConfigError`."""
    shape = 'option assign: JSON such as {"orders":[0,1]} is expected'
    document = _parse_json(text, shape)
    for topic, numbers in document.items():
        whole = isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)
        if not whole or not numbers:
            raise ConfigError(f'{shape}, and "{topic}" has {json.dumps(numbers)[:40]}')
    return {topic: tuple(sorted(set(numbers))) for topic, numbers in document.items()}


def _parse_json(text: str, shape: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        raise ConfigError(f"{shape}, not {text[:60]}") from None
    if not isinstance(document, dict) or not document:
        raise ConfigError(f"{shape}, not {text[:60]}")
    return document
