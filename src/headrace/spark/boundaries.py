"""Starting and ending positions of a query, from the options.

As in Spark's Kafka source, a time for all partitions takes precedence, then times by partition, then offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from headrace.errors import ConfigError
from headrace.spark.offsets import EARLIEST, LATEST, Offsets, TopicPartition, parse_offsets
from headrace.spark.options import Options

OffsetForTime: TypeAlias = Callable[[Mapping[TopicPartition, int]], Mapping[TopicPartition, int | None]]
"""Partitions and times (Unix ms) → the first offset of that time or later; None: there is no such record."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Start or end of a read. Exactly one of `everywhere`, `offsets`, `time_ms` and `times` is set."""

    option: str
    """Name of the option, for error messages."""
    everywhere: int | None = None
    offsets: Mapping[TopicPartition, int] | None = None
    time_ms: int | None = None
    times: Mapping[TopicPartition, int] | None = None
    otherwise: int | None = None
    """Position for a time after the last record: `LATEST`, or None for an error."""

    @classmethod
    def start(cls, options: Options, *, streaming: bool) -> Boundary:
        otherwise = LATEST if options.choice("startingOffsetsByTimestampStrategy", ("error", "latest")) == "latest" else None
        found = cls._by_time(options, "startingTimestamp", "startingOffsetsByTimestamp", otherwise)
        if found is not None:
            return found
        boundary = cls._by_offset(options, "startingOffsets", "latest" if streaming else "earliest")
        if not streaming and (boundary.everywhere == LATEST or LATEST in (boundary.offsets or {}).values()):
            raise ConfigError("option startingOffsets: a batch query cannot start at latest, it would read nothing")
        return boundary

    @classmethod
    def end(cls, options: Options) -> Boundary:
        found = cls._by_time(options, "endingTimestamp", "endingOffsetsByTimestamp", LATEST)
        if found is not None:
            return found
        boundary = cls._by_offset(options, "endingOffsets", "latest")
        if boundary.everywhere == EARLIEST or EARLIEST in (boundary.offsets or {}).values():
            raise ConfigError("option endingOffsets: a batch query cannot end at earliest, it would read nothing")
        return boundary

    @classmethod
    def _by_time(cls, options: Options, everywhere: str, by_partition: str, otherwise: int | None) -> Boundary | None:
        time_ms = options.count(everywhere, None, least=0)
        if time_ms is not None:
            return cls(everywhere, time_ms=time_ms, otherwise=otherwise)
        text = options.text(by_partition)
        return cls(by_partition, times=parse_offsets(by_partition, text, least=0), otherwise=otherwise) if text else None

    @classmethod
    def _by_offset(cls, options: Options, name: str, default: str) -> Boundary:
        text = options.text(name, default)
        word = text.lower()
        if word in ("earliest", "latest"):
            return cls(name, everywhere=EARLIEST if word == "earliest" else LATEST)
        if not text.startswith("{"):
            raise ConfigError(f'option {name}: expected earliest, latest or offsets such as {{"orders":{{"0":23}}}}, got "{text[:60]}"')
        return cls(name, offsets=parse_offsets(name, text, least=EARLIEST))

    def resolve(self, firsts: Offsets, ends: Offsets, offset_for_time: OffsetForTime) -> Offsets:
        """Return an offset for each partition of `ends`. Offsets from the option are not checked against the log."""
        if self.everywhere is not None:
            return dict(firsts if self.everywhere == EARLIEST else ends)
        if self.offsets is not None:
            self._check_complete(self.offsets, ends)
            special = {EARLIEST: firsts, LATEST: ends}
            return {place: special[offset][place] if offset in special else offset for place, offset in self.offsets.items()}
        times = self._times(ends)
        return {place: self._found(place, times[place], offset, ends) for place, offset in offset_for_time(times).items()}

    def _times(self, ends: Offsets) -> Mapping[TopicPartition, int]:
        if self.times is None:
            assert self.time_ms is not None, "one of the four fields is set"
            return dict.fromkeys(ends, self.time_ms)
        self._check_complete(self.times, ends)
        return self.times

    def _found(self, place: TopicPartition, time_ms: int, offset: int | None, ends: Offsets) -> int:
        if offset is not None:
            return offset
        if self.otherwise is None:
            raise ConfigError(
                f"option {self.option}: topic {place[0]}, partition {place[1]} has no record at {time_ms} or later; "
                "set startingOffsetsByTimestampStrategy=latest to start at its end"
            )
        return ends[place]

    def _check_complete(self, given: Mapping[TopicPartition, int], ends: Offsets) -> None:
        """Reject a missing or an unknown partition, which is probably a mistake."""
        missing, extra = sorted(ends.keys() - given.keys()), sorted(given.keys() - ends.keys())
        if missing:
            raise ConfigError(f"option {self.option} does not name {_listed(missing)}; -2 means earliest and -1 latest")
        if extra:
            raise ConfigError(f"option {self.option} names {_listed(extra)}, which the query does not read")


def _listed(places: list[TopicPartition]) -> str:
    named = ", ".join(f"partition {partition} of {topic}" for topic, partition in places[:3])
    return named + (f" and {len(places) - 3} more" if len(places) > 3 else "")
