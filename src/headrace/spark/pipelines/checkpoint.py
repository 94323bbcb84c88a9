"""Reader of Spark's checkpoint of a query, without Spark: the unfinished batch and its offsets.

CHECKPOINT/offsets/17     written before batch 17 starts: a version, its settings, then a line of JSON for each source
CHECKPOINT/commits/17     written after batch 17
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

Offsets = dict[str, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A batch that was started and not committed, with its range of offsets by partition."""

    batch: int
    ranges: dict[tuple[str, int], tuple[int, int]]

    def __str__(self) -> str:
        shown = [
            f"{topic}[{partition}] {start}–{end - 1}" for (topic, partition), (start, end) in sorted(self.ranges.items()) if end > start
        ]
        return ", ".join(shown[:8]) + (", …" if len(shown) > 8 else "")


def unfinished(directory: Path) -> Unfinished | None:
    """Return the batch that a restart repeats, if any. None also if the checkpoint is not on this machine."""
    batch = _last(directory / "offsets")
    done = _last(directory / "commits")
    if batch is None or (done is not None and done >= batch):
        return None
    before, after = _offsets(directory / "offsets" / str(batch - 1)), _offsets(directory / "offsets" / str(batch))
    ranges = {
        (topic, int(partition)): (before.get(topic, {}).get(partition, 0), end)
        for topic, partitions in after.items()
        for partition, end in partitions.items()
    }
    return Unfinished(batch, ranges)


def _last(directory: Path) -> int | None:
    if not directory.is_dir():
        return None
    return max((int(entry.name) for entry in directory.iterdir() if entry.name.isdigit()), default=None)


def _offsets(file: Path) -> Offsets:
    """Return the offsets of all `headrace` sources; other sources have another JSON shape and are skipped."""
    found: Offsets = {}
    if not file.exists():
        return found
    for line in file.read_text(encoding="utf-8").splitlines()[2:]:
        try:
            source = json.loads(line)
        except ValueError:
            continue
        if isinstance(source, dict) and all(isinstance(partitions, dict) for partitions in source.values()):
            for topic, partitions in source.items():
                found.setdefault(topic, {}).update(partitions)
    return found
