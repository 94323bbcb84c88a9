"""What a topic demands of its records, wherever they come from: every way into the log places its runs, and placing asks the rule.

A record that breaks the rule is refused, or kept among the topic's dead letters, as the rule says. Dead letters are written in the same
append as the records they stood between: a publisher whose answer says yes knows that each record is in one place or the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Final, TypeAlias, TypeVar

from headrace.broker.partitioner import pick
from headrace.broker.schema_checks import SchemaChecks
from headrace.engine.contract import Write
from headrace.errors import InvalidRecord, Unavailable, UnknownTopic
from headrace.records import Run
from headrace.schemas import Schema

T = TypeVar("T")

NOWHERE: Final = (-1, (1 << 63) - 1)
"""The placement of a record that went to the dead letters: no partition, and an offset no log will have."""


class OnInvalid(StrEnum):
    """What becomes of a record that does not fit."""

    REJECT = "reject"
    """The publisher is told, and nothing of the run is written."""
    DEAD_LETTER = "dead_letter"
    """It is kept among the dead letters, the rest of the run is written."""


class Divert(Enum):
    """Whether a way into the log may send records to the dead letters."""

    AS_RULED = auto()
    NEVER = auto()
    """They come from there."""
    ALWAYS = auto()
    """Nobody is there any more who could be told."""


Letters: TypeAlias = Callable[[str, Run, Sequence[str]], list[Write]]
"""(topic, records, what is wrong with each) → the writes that keep them. Raises `UnknownTopic` if there is no place for them yet."""
MakeRoom: TypeAlias = Callable[[str], None]
"""See to it that there soon is one."""


@dataclass(slots=True)
class Sifted:
    """A run without the records that did not fit."""

    count: int
    kept: list[int]
    """Indexes."""
    run: Run
    """The kept ones."""
    writes: list[Write]
    """The others."""

    def weave(self, places: Sequence[T], nowhere: T) -> list[T]:
        """The places of the kept ones among those of all."""
        woven = [nowhere] * self.count
        for index, place in zip(self.kept, places, strict=True):
            woven[index] = place
        return woven


class Rule:
    """One topic's."""

    __slots__ = ("_checks", "_letters", "_make_room", "_schema", "label", "on_invalid", "topic")

    def __init__(
        self,
        topic: str,
        schema: Schema | str,
        label: str,
        on_invalid: OnInvalid,
        letters: Letters,
        make_room: MakeRoom,
        checks: SchemaChecks,
    ) -> None:
        """`schema` is a text where there should be a schema and is none: then nothing can be judged, and so nothing be written."""
        self.topic = topic
        self.label = label
        self.on_invalid = on_invalid
        self._schema = schema
        self._letters = letters
        self._make_room = make_room
        self._checks = checks

    def check_ready(self, values: Sequence[bytes | None]) -> None:
        """Whether the values can be judged at once. Raises `SchemaCheckPending`, `Unavailable`."""
        if isinstance(self._schema, str) or self._checks.are_small(self._schema, values):
            return
        self._checks.faults(self._schema, values)

    def sift(self, run: Run, divert: Divert) -> Sifted | None:
        """None: everything fits. Raises `InvalidRecord`, `SchemaCheckPending`, `Unavailable`."""
        schema = self._schema
        if isinstance(schema, str):
            raise Unavailable(f"records of {self.topic} cannot be checked: {schema}")
        known: Sequence[Sequence[str]] | None = None
        if self._checks.are_small(schema, run.values):
            if schema.accepts(run.values):
                return None
        else:
            known = self._checks.faults(schema, run.values)
            if not any(known):
                self._checks.used(schema, run.values)
                return None
        may_divert = divert is Divert.ALWAYS or (divert is Divert.AS_RULED and self.on_invalid is OnInvalid.DEAD_LETTER)
        faults: dict[int, str] = {}
        for index, value in enumerate(run.values):
            found = () if value is None else tuple(schema.faults(value) if known is None else known[index])
            if found:
                faults[index] = "; ".join(found)
                if not may_divert:
                    raise InvalidRecord(index=index, faults=found, schema=self.label)
        assert faults, "a run that was not accepted has a fault"
        if known is not None:
            self._checks.used(schema, run.values)
        kept = [index for index in range(len(run)) if index not in faults]
        try:
            writes = self._letters(self.topic, pick(run, list(faults)), [f"{text} ({self.label})" for text in faults.values()])
        except UnknownTopic:
            # Somebody has just removed the dead letters, topic and all. A refusal loses nothing.
            self._make_room(self.topic)
            raise Unavailable(f"the dead letters of {self.topic} are being made: try again") from None
        return Sifted(len(run), kept, pick(run, kept), writes)
