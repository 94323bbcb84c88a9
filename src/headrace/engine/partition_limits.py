"""Limits of the number of partitions, the same for every engine."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.engine.contract import Topic
from headrace.errors import InvalidRequest, LimitExceeded
from headrace.limits import PARTITIONS_MAX, PARTITIONS_PER_TOPIC_MAX


def check_partitions(topics: Mapping[str, Topic], name: str, wanted: int, *, internal: bool, taken: int | None = None) -> None:
    """Check the number of partitions of a new or altered topic. Raises `InvalidRequest` or `LimitExceeded`.

    `taken` are the partitions of all topics that are not internal, if the caller counts them.

    Internal topics do not count for the limit of a broker: it needs the few it has, even if users have taken all the rest.
    """
    least = topics[name].partitions if name in topics else 1
    if wanted < least:
        raise InvalidRequest(f"topic {name!r}: expected at least {least} partition{'s' * (least > 1)}, got {wanted}")
    if wanted > PARTITIONS_PER_TOPIC_MAX:
        raise LimitExceeded(f"{wanted} partitions of topic {name!r} exceed the limit of {PARTITIONS_PER_TOPIC_MAX} per topic")
    if internal:
        return
    if taken is None:
        taken = sum(topic.partitions for topic in topics.values() if not topic.internal)
    total = taken + wanted - (topics[name].partitions if name in topics else 0)
    if total > PARTITIONS_MAX:
        raise LimitExceeded(f"{total} partitions exceed the limit of {PARTITIONS_MAX} per broker")
