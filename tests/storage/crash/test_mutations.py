"""Files truncated at every byte and flipped at every bit: each damage is detected or harmless, and affects only what it hits.

The normal suite takes an even sample of long files; HEADRACE_MUTATIONS=all takes every bit.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest

from tests.conftest import Proof
from tests.storage.crash.damage import WINDOW_BYTES, Original, Unit, inspect, original, units, used
from tests.storage.crash.history import Anomaly
from tests.storage.crash.shapes import DAMAGED

pytestmark = pytest.mark.crash_images

PER_FILE = None if os.environ.get("HEADRACE_MUTATIONS") == "all" else 320
"""Mutations of one kind per file in the normal suite."""
THOROUGH_EVERY = 8
KINDS = ("journal", "segment", "index", "MANIFEST", "IDENTITY")
EMPTY: frozenset[tuple[int, int]] = frozenset()


def drawn(count: int) -> range:
    """Sample evenly from `range(count)`, in odd steps so that every bit of a byte is covered."""
    step = 1 if PER_FILE is None else max(1, count // PER_FILE) | 1
    return range(0, count, step)


def thorough(count: int) -> bool:
    return count % THOROUGH_EVERY == 0


def hit(of: list[Unit], start: int, stop: int) -> frozenset[tuple[int, int]]:
    return EMPTY.union(*(unit.records for unit in of if unit.start < stop and start < unit.stop))


def examined(before: Original, kind: str, closed: bool) -> Iterator[tuple[str, bytes, int, list[Unit]]]:
    """Return (path, content, start of the damage, units) of each file of the kind."""
    paths = before.paths(kind)
    assert paths or (kind == "index" and not closed), f"no {kind} file to damage"
    for path in paths:
        content = before.contents[path]
        yield path, content, max(0, used(path, content) - WINDOW_BYTES), units(path, content)


@pytest.fixture(params=[(shape.name, closed) for shape in DAMAGED for closed in (False, True)], ids=lambda param: f"{param[0]}-{param[1]}")
def before(request: pytest.FixtureRequest) -> tuple[Original, bool]:
    name, closed = request.param
    return original(name, closed=closed), closed


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_cut_at_any_byte_keeps_what_is_before_the_cut(before: tuple[Original, bool], kind: str, proof: Proof) -> None:
    directory, closed = before
    count = 0
    for path, content, start, of in examined(directory, kind, closed):
        for index in drawn(used(path, content) - start):
            cut, count = start + index, count + 1
            risk = hit(of, cut, len(content))
            try:
                inspect(
                    directory.damaged(path, content[:cut]), directory, risk, silent=kind == "journal", thorough=count % THOROUGH_EVERY == 0
                )
            except Anomaly as anomaly:
                raise Anomaly(f"{path} cut to {cut} of {len(content)} bytes: {anomaly}") from anomaly
    proof("mutations survived", count)


@pytest.mark.parametrize("kind", KINDS)
def test_a_flipped_bit_costs_at_most_what_it_is_in(before: tuple[Original, bool], kind: str, proof: Proof) -> None:
    directory, closed = before
    count = 0
    for path, content, start, of in examined(directory, kind, closed):
        for index in drawn(8 * (used(path, content) - start)):
            at, bit, count = start + index // 8, index % 8, count + 1
            flipped = bytearray(content)
            flipped[at] ^= 1 << bit
            risk = hit(of, at, at + 1)
            silent = bool(risk) and of[-1].start <= at and kind == "journal"  # the last frame may count as torn
            try:
                inspect(directory.damaged(path, bytes(flipped)), directory, risk, silent=silent, thorough=thorough(count))
            except Anomaly as anomaly:
                raise Anomaly(f"{path}, bit {bit} of byte {at} flipped: {anomaly}") from anomaly
    proof("mutations survived", count)


@pytest.mark.parametrize("kind", ("journal", "segment", "index", "MANIFEST"))
def test_overwritten_and_misplaced_sectors_cost_at_most_what_they_hit(before: tuple[Original, bool], kind: str, proof: Proof) -> None:
    directory, closed = before
    count, rng = 0, random.Random(1)
    for path, content, start, of in examined(directory, kind, closed):
        end = used(path, content)
        for at in sorted({start + index - (start + index) % 8 for index in drawn(end - start)})[:: 1 if PER_FILE is None else 4]:
            stop = min(at + 512, end)
            elsewhere = rng.randrange(0, max(1, end - 512) // 8 + 1) * 8
            for label, fresh in (
                ("zeros", bytes(stop - at)),
                ("ones", b"\xff" * (stop - at)),
                ("noise", rng.randbytes(stop - at)),
                ("a copy of other bytes", content[elsewhere : elsewhere + stop - at]),
                ("zeros to the end", bytes(end - at)),
            ):
                count += 1
                changed = content[:at] + fresh + content[at + len(fresh) :]
                risk = hit(of, at, at + len(fresh))
                try:
                    inspect(
                        directory.damaged(path, changed), directory, risk, silent=kind == "journal", thorough=count % THOROUGH_EVERY == 0
                    )
                except Anomaly as anomaly:
                    raise Anomaly(f"{path}: {label} at byte {at}: {anomaly}") from anomaly
    proof("mutations survived", count)
