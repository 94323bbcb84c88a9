"""Requirements of a topic on its records. Every publish path creates a `Placing`, and `Placing` applies the rule.

A record that violates the rule is rejected or moved to the topic's dead letters, depending on the rule. The dead letters are part of
the same append as the valid records: after a successful answer, each record is in one of the two places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final, TypeAlias, TypeVar

from headrace.broker.publishing.partitioner import pick
from headrace.broker.schema_checks import SchemaChecks
from headrace.engine.contract import Write
from headrace.errors import InvalidRecord, Unavailable, UnknownTopic
from headrace.records import RecordBatch
from headrace.schemas import Schema

T = TypeVar("T")

NOWHERE: Final = (-1, (1 << 63) - 1)
"""Placement of a record that went to the dead letters: no partition, and an offset that no log reaches."""


class OnInvalid(StrEnum):
    """Treatment of a record that does not satisfy the schema."""

    REJECT = "reject"
    """Return an error to the publisher and write nothing of the batch."""
    DEAD_LETTER = "dead_letter"
    """Move the record to the dead letters and write the rest of the batch."""


class Divert(Enum):
    """Permission of a publish path to move records to the dead letters."""

    AS_RULED = auto()
    NEVER = auto()
    """The records come from the dead letters."""
    ALWAYS = auto()
    """No publisher is connected that could receive an error."""


Letters: TypeAlias = Callable[[str, RecordBatch, Sequence[str]], list[Write]]
"""(topic, records, fault of each) → the writes that store them. Raises `UnknownTopic` if the dead-letter topic does not exist yet."""
CreateDeadLetterTopic: TypeAlias = Callable[[str], None]
"""Create the dead-letter topic in the background."""


@dataclass(slots=True)
class Sifted:
    """A batch split into valid and invalid records."""

    count: int
    kept: list[int]
    """Indexes of the valid records."""
    batch: RecordBatch
    """The valid records."""
    writes: list[Write]
    """The invalid records."""

    def weave(self, places: Sequence[T], nowhere: T) -> list[T]:
        """Merge the places of the valid records with `nowhere` for the others, in batch order."""
        woven = [nowhere] * self.count
        for index, place in zip(self.kept, places, strict=True):
            woven[index] = place
        return woven


class Rule:
    """Schema requirement of one topic."""

    __slots__ = ("_checks", "_create_dead_letter_topic", "_letters", "_schema", "label", "on_invalid", "topic")

    def __init__(
        self,
        topic: str,
        schema: Schema | str,
        label: str,
        on_invalid: OnInvalid,
        letters: Letters,
        create_dead_letter_topic: CreateDeadLetterTopic,
        checks: SchemaChecks,
    ) -> None:
        """`schema` is an error text if the required schema is missing. Nothing can be checked then, so nothing is written."""
        self.topic = topic
        self.label = label
        self.on_invalid = on_invalid
        self._schema = schema
        self._letters = letters
        self._create_dead_letter_topic = create_dead_letter_topic
        self._checks = checks

    def check_ready(self, values: Sequence[bytes | None]) -> None:
        """Raise unless the values can be checked at once: `SchemaCheckPending`, `Unavailable`."""
        if isinstance(self._schema, str) or self._checks.are_small(self._schema, values):
            return
        self._checks.faults(self._schema, values)

    def sift(self, batch: RecordBatch, divert: Divert) -> Sifted | None:
        """Split the batch; None if all records are valid. Raises `InvalidRecord`, `SchemaCheckPending`, `Unavailable`."""
        schema = self._schema
        if isinstance(schema, str):
            raise Unavailable(f"records of {self.topic} cannot be checked: {schema}")
        known: Sequence[Sequence[str]] | None = None
        if self._checks.are_small(schema, batch.values):
            if schema.accepts(batch.values):
                return None
        else:
            known = self._checks.faults(schema, batch.values)
            if not any(known):
                self._checks.used(schema, batch.values)
                return None
        may_divert = divert is Divert.ALWAYS or (divert is Divert.AS_RULED and self.on_invalid is OnInvalid.DEAD_LETTER)
        faults: dict[int, str] = {}
        for index, value in enumerate(batch.values):
            found = () if value is None else tuple(schema.faults(value) if known is None else known[index])
            if found:
                faults[index] = "; ".join(found)
                if not may_divert:
                    raise InvalidRecord(index=index, faults=found, schema=self.label)
        assert faults, "a batch that was not accepted has a fault"
        if known is not None:
            self._checks.used(schema, batch.values)
        kept = [index for index in range(len(batch)) if index not in faults]
        try:
            writes = self._letters(self.topic, pick(batch, list(faults)), [f"{text} ({self.label})" for text in faults.values()])
        except UnknownTopic:
            # The dead-letter topic has just been deleted. An error loses nothing: the publisher retries.
            self._create_dead_letter_topic(self.topic)
            raise Unavailable(f"the dead-letter topic of {self.topic} is being created: try again") from None
        return Sifted(len(batch), kept, pick(batch, kept), writes)
