"""Which partition a record goes to when its publisher leaves the choice to the broker.

A record with a key goes to partition FNV-1a-32(key) mod partitions, so that the records of one key stay in order and a client
that knows the rule can foretell the place. Records without a key take turns, a whole run at a time: cutting it up would cost
more than evenness is worth.

Hashing byte by byte in Python costs some 60 ns a byte. A run is hashed instead in lanes: the keys of equal length sit side by
side in one large integer, 64 bits each, and one xor, one multiplication and one mask by the interpreter's C code move all of
them on by a byte. A lane never spills into its neighbour, since 2^32 times the 25-bit prime is below 2^57.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from headrace.records import RecordBatch

FNV_BASIS: Final = 0x811C9DC5
FNV_PRIME: Final = 0x01000193
_MASK: Final = 0xFFFFFFFF
_LANE_BYTES: Final = 8
_LANES_WORTHWHILE: Final = 16
"""Below this many keys of one length, building the integers costs more than it saves."""


def fnv1a(key: bytes) -> int:
    """The 32-bit FNV-1a hash of one key."""
    state = FNV_BASIS
    for byte in key:
        state = (state ^ byte) * FNV_PRIME & _MASK
    return state


def fnv1a_lanes(keys: Sequence[bytes]) -> list[int]:
    """The hashes of keys that all have the same length."""
    count, length = len(keys), len(keys[0])
    joined = b"".join(keys)
    ones = int.from_bytes(b"\x01\0\0\0\0\0\0\0" * count, "little")
    mask, state = ones * _MASK, ones * FNV_BASIS
    lanes = bytearray(_LANE_BYTES * count)
    for position in range(length):
        lanes[::_LANE_BYTES] = joined[position::length]
        state = (state ^ int.from_bytes(lanes, "little")) * FNV_PRIME & mask
    return memoryview(state.to_bytes(_LANE_BYTES * count, "little")).cast("Q").tolist()


def hashes(keys: Sequence[bytes]) -> list[int]:
    """The hash of each key, in order."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(map(len, keys)):
        by_length.setdefault(length, []).append(index)
    found = [0] * len(keys)
    for indexes in by_length.values():
        alike = [keys[index] for index in indexes]
        hashed = fnv1a_lanes(alike) if len(alike) >= _LANES_WORTHWHILE else map(fnv1a, alike)
        for index, value in zip(indexes, hashed, strict=True):
            found[index] = value
    return found


def partition_of(key: bytes, partitions: int) -> int:
    return fnv1a(key) % partitions


def assign(batch: RecordBatch, partitions: int, turn: int) -> dict[int, list[int]]:
    """The indexes of the run's records by partition, in order. Records without a key go to partition `turn`."""
    assert batch.keys is not None and partitions > 1
    keyed = [index for index, key in enumerate(batch.keys) if key is not None]
    places = [turn] * len(batch)
    for index, value in zip(keyed, hashes([key for key in batch.keys if key is not None]), strict=True):
        places[index] = value % partitions
    assigned: dict[int, list[int]] = {}
    for index, place in enumerate(places):
        assigned.setdefault(place, []).append(index)
    return assigned


def pick(batch: RecordBatch, indexes: Sequence[int]) -> RecordBatch:
    """The records with these indexes, as a run."""
    if len(indexes) == len(batch):
        return batch
    values, keys, headers, timestamps, expiries = batch.values, batch.keys, batch.headers, batch.timestamps, batch.expiries
    return RecordBatch(
        [values[index] for index in indexes],
        None if keys is None else [keys[index] for index in indexes],
        None if headers is None else [headers[index] for index in indexes],
        None if timestamps is None else [timestamps[index] for index in indexes],
        None if expiries is None else [expiries[index] for index in indexes],
    )
