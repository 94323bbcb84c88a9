"""Dead letters: records nobody could settle, kept in a topic of their own with a note of where they came from and why."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from headrace.broker.lanes import Row
from headrace.broker.names import check_topic_name
from headrace.broker.publish import Placing, Publisher
from headrace.engine.admission import headers_bytes
from headrace.engine.contract import Ack
from headrace.limits import HEADERS_BYTES_MAX, HEADERS_MAX
from headrace.records import Headers, Run

SUFFIX: Final = ".dlq"


class DeadLetter(NamedTuple):
    """A record and its fate."""

    row: Row
    partition: int
    attempts: int
    reason: str


def dead_letter_topic(topic: str) -> str:
    """Raises `InvalidTopicName` where the topic's own name leaves no room for the suffix."""
    name = topic + SUFFIX
    check_topic_name(name)
    return name


class DeadLetters:
    """`ensure` creates a topic unless it is there."""

    def __init__(self, publisher: Publisher, ensure: Callable[[str], Awaitable[object]]) -> None:
        self._publisher = publisher
        self._ensure = ensure

    async def append(self, topic: str, letters: Sequence[DeadLetter]) -> None:
        """Durable when it returns."""
        name = dead_letter_topic(topic)
        await self._ensure(name)
        run = Run(
            [letter.row.value for letter in letters],
            [letter.row.key for letter in letters],
            [_headers(topic, letter) for letter in letters],
        )
        placing = Placing(self._publisher.own_route(name), run, None)
        await self._publisher.append(placing.writes, Ack.DURABLE)


def _headers(topic: str, letter: DeadLetter) -> Headers:
    """The record's own headers, then ours. Where both together are too many, the last of its own give way."""
    notes: Headers = (
        ("x-headrace-reason", letter.reason.encode()),
        ("x-headrace-source-topic", topic.encode()),
        ("x-headrace-source-partition", b"%d" % letter.partition),
        ("x-headrace-source-offset", b"%d" % letter.row.offset),
        ("x-headrace-attempts", b"%d" % letter.attempts),
    )
    own = letter.row.headers[: HEADERS_MAX - len(notes)]
    while own and headers_bytes(own + notes) > HEADERS_BYTES_MAX:
        own = own[:-1]
    return own + notes
