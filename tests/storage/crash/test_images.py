"""No power cut loses an acknowledged record, invents one, or leaves half of an atomic append.

The environment selects a longer test: HEADRACE_CRASH_SEEDS=100 takes a hundred seeds of each workload, HEADRACE_CRASH_STEPS=3 all
histories of three steps. A failure names its workload and seed; `survive(shape, seed)` reproduces it.
"""

from __future__ import annotations

import itertools
import os

import pytest

from tests.conftest import Proof
from tests.storage.crash.shapes import SHAPES, SHORT
from tests.storage.crash.survival import survive
from tests.storage.crash.workload import Shape

pytestmark = pytest.mark.crash_images

SEEDS = int(os.environ.get("HEADRACE_CRASH_SEEDS", "1"))
STEPS = int(os.environ.get("HEADRACE_CRASH_STEPS", "2"))


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_every_image_of_a_power_cut_recovers(shape: Shape, proof: Proof) -> None:
    for seed in range(1, SEEDS + 1):
        outcome = survive(shape, seed)
        assert outcome.images > 100, "a workload that leaves few images proves little"
        proof("crash images recovered", outcome.images)


@pytest.mark.parametrize("first", SHORT.weights)
def test_every_image_of_a_short_history_recovers(first: str, proof: Proof) -> None:
    """Short histories, exhaustively: every pair of operations in every order."""
    for steps in itertools.product(SHORT.weights, repeat=STEPS - 1):
        outcome = survive(SHORT, 1, steps=["append", first, *steps, "append"])
        proof("crash images recovered", outcome.images)
