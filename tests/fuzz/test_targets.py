"""Every execution of the suite checks the targets of `make fuzz` with their seeds and a few hundred damaged inputs."""

from __future__ import annotations

import random

import pytest

from tests.conftest import Proof
from tests.fuzz.targets import SEPARATOR, TARGETS

INPUTS = 300
WORDS = [b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff", b"[" * 40, b"{", b'"', b"1e999", b"-", b"null", b"\xc3", SEPARATOR]


def damaged(rng: random.Random, seeds: list[bytes]) -> bytes:
    content = bytearray(rng.choice(seeds))
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(content) + 1)
        match rng.randrange(4):
            case 0:
                content[at : at + 1] = rng.randbytes(1)
            case 1:
                del content[at : at + rng.randrange(1, 12)]
            case 2:
                content[at:at] = rng.choice(WORDS)
            case _:
                other = rng.choice(seeds)
                content[at:] = other[rng.randrange(len(other) + 1) :]
    return bytes(content)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_seeds_and_refuses_damaged_ones_in_documented_ways(name: str, proof: Proof) -> None:
    target, rng = TARGETS[name], random.Random(name)
    seeds = target.seeds()
    assert seeds
    for seed in seeds:
        target.run(seed)
    for _ in range(INPUTS):
        target.run(damaged(rng, seeds))
    proof("fuzz inputs", len(seeds) + INPUTS)
