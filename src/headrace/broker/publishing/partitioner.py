"""Partition choice for records whose publisher does not name a partition.

A record with a key goes to partition FNV-1a-32(key) mod partitions. With an engine whose log has other writers, the hash is theirs: on
Kafka murmur2(key) & 0x7fffffff mod partitions, as Java clients compute it. The records of one key therefore stay in order, and a client can
compute the partition. Records without a key rotate over the partitions, one whole batch at a time: splitting a batch costs more than an
even spread is worth.

Hashing byte by byte in Python costs about 60 ns per byte. `fnv1a_equal_length` hashes many keys of equal length at once: the keys sit
side by side in one large integer, 64 bits each, and one xor, one multiplication and one mask advance all of them by a byte. No slot
overflows into the next, because 2^32 times the 25-bit prime is below 2^57.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from headrace.engine.contract import Placement
from headrace.records import RecordBatch

FNV_BASIS: Final = 0x811C9DC5
FNV_PRIME: Final = 0x01000193
MURMUR_SEED: Final = 0x9747B28C
MURMUR_PRIME: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
_SLOT_BYTES: Final = 8
_BATCH_KEYS_MIN: Final = 16
"""Minimum number of keys of one length for which `fnv1a_equal_length` is faster than `fnv1a`."""


def fnv1a(key: bytes) -> int:
    """Return the 32-bit FNV-1a hash of one key."""
    state = FNV_BASIS
    for byte in key:
        state = (state ^ byte) * FNV_PRIME & _MASK
    return state


def fnv1a_equal_length(keys: Sequence[bytes]) -> list[int]:
    """Return the hashes of keys that all have the same length."""
    count, length = len(keys), len(keys[0])
    joined = b"".join(keys)
    ones = int.from_bytes(b"\x01\0\0\0\0\0\0\0" * count, "little")
    mask, state = ones * _MASK, ones * FNV_BASIS
    slots = bytearray(_SLOT_BYTES * count)
    for position in range(length):
        slots[::_SLOT_BYTES] = joined[position::length]
        state = (state ^ int.from_bytes(slots, "little")) * FNV_PRIME & mask
    return memoryview(state.to_bytes(_SLOT_BYTES * count, "little")).cast("Q").tolist()


def murmur2_equal_length(keys: Sequence[bytes]) -> list[int]:
    """Return the 31-bit murmur2 hashes of keys that all have the same length, as Kafka's Java clients compute them."""
    count, length = len(keys), len(keys[0])
    joined = b"".join(keys)
    ones = int.from_bytes(b"\x01\0\0\0\0\0\0\0" * count, "little")
    mask, state = ones * _MASK, ones * ((MURMUR_SEED ^ length) & _MASK)
    for position in range(0, length, 4):
        slots = bytearray(_SLOT_BYTES * count)
        for index in range(min(4, length - position)):
            slots[index::_SLOT_BYTES] = joined[position + index :: length]
        word = int.from_bytes(slots, "little")
        if length - position < 4:
            state = (state ^ word) * MURMUR_PRIME & mask
            break
        word = word * MURMUR_PRIME & mask
        word = (word ^ (word >> 24 & ones * 0xFF)) * MURMUR_PRIME & mask
        state = (state * MURMUR_PRIME & mask) ^ word
    state = (state ^ (state >> 13 & ones * 0x7FFFF)) * MURMUR_PRIME & mask
    state ^= state >> 15 & ones * 0x1FFFF
    return memoryview((state & ones * 0x7FFFFFFF).to_bytes(_SLOT_BYTES * count, "little")).cast("Q").tolist()


def hashes(keys: Sequence[bytes], placement: Placement = Placement.FNV1A) -> list[int]:
    """Return the hash of each key, in order."""
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(map(len, keys)):
        by_length.setdefault(length, []).append(index)
    found = [0] * len(keys)
    for indexes in by_length.values():
        alike = [keys[index] for index in indexes]
        if placement is Placement.MURMUR2:
            hashed: Iterable[int] = murmur2_equal_length(alike)
        else:
            hashed = fnv1a_equal_length(alike) if len(alike) >= _BATCH_KEYS_MIN else map(fnv1a, alike)
        for index, value in zip(indexes, hashed, strict=True):
            found[index] = value
    return found


def partition_of(key: bytes, partitions: int) -> int:
    return fnv1a(key) % partitions


def assign(batch: RecordBatch, partitions: int, turn: int, placement: Placement = Placement.FNV1A) -> dict[int, list[int]]:
    """Return the indexes of the records by partition, in order. Records without a key go to partition `turn`."""
    assert batch.keys is not None and partitions > 1
    keyed = [index for index, key in enumerate(batch.keys) if key is not None]
    places = [turn] * len(batch)
    for index, value in zip(keyed, hashes([key for key in batch.keys if key is not None], placement), strict=True):
        places[index] = value % partitions
    assigned: dict[int, list[int]] = {}
    for index, place in enumerate(places):
        assigned.setdefault(place, []).append(index)
    return assigned


def pick(batch: RecordBatch, indexes: Sequence[int]) -> RecordBatch:
    """Return the records with these indexes as a batch."""
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
