"""Random system-call faults on a real broker: no acknowledged record is lost, torn or duplicated.

`HEADRACE_FAULTS=500` injects 500 faults instead of the usual 50. A failure names its seed; the same seed picks the same faults.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import Proof
from tests.faults.harness import suffering
from tests.faults.injection import Fault

FAULTS: Final = int(os.environ.get("HEADRACE_FAULTS", "50"))
FAULTS_PER_BROKER: Final = 25

SYNC_ERRORS: Final = ("EIO", "ENOSPC", "EDQUOT")
TABLE_ERRORS: Final = ("EMFILE", "ENFILE", "ENOMEM")
ERRORS: Final = {
    "fdatasync": SYNC_ERRORS,
    "fsync": SYNC_ERRORS,
    "pwritev2": ("EIO", "ENOSPC", "EDQUOT", "ENOMEM"),
    "fallocate": ("EIO", "ENOSPC", "EDQUOT"),
    "openat": ("EIO", "ENOSPC", *TABLE_ERRORS),
    "rename": ("EIO", "ENOSPC", "EDQUOT", "ENOMEM"),
    "unlink": ("EIO", "ENOMEM"),
    "mkdir": ("EIO", "ENOSPC", "EDQUOT", "ENOMEM"),
    "statfs": ("EIO", "ENOMEM"),
    "accept4": ("ECONNABORTED", "EINTR", "ENOBUFS", *TABLE_ERRORS),
    "clone,clone3": ("EAGAIN", "ENOMEM"),
}
SYNCS: Final = ("fdatasync", "fsync")
RETRIABLE: Final = {"EMFILE", "ENFILE", "ENOMEM", "EAGAIN", "ENOSPC", "EDQUOT", "EINTR", "ENOBUFS", "ECONNABORTED"}
"""Transient errors. They fence the store only if a sync raised them, because the content of the disk is then unknown."""
WHEN: Final = ("1", "1", "2", "3", "1+3", "1..4")
SLOW: Final = ("fdatasync", "pwritev2", "fsync", "openat", "rename")
PHASES: Final = ("live",) * 7 + ("start", "stop")


def random_fault(rng: random.Random) -> Fault:
    if rng.random() < 0.15:
        return Fault(rng.choice(SLOW), f"{rng.choice(('delay_enter', 'delay_exit'))}={rng.choice((500, 5_000, 30_000))}", "1+7")
    calls = rng.choice(tuple(ERRORS))
    return Fault(calls, f"error={rng.choice(ERRORS[calls])}", rng.choice(WHEN))


def may_fence(fault: Fault) -> bool:
    return not fault.is_delay and (fault.calls in SYNCS or fault.error not in RETRIABLE) and fault.calls not in ("statfs", "accept4")


@pytest.mark.kill_loop
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(-(-FAULTS // FAULTS_PER_BROKER)))
def test_no_fault_of_the_system_costs_an_acknowledged_record(tmp_path: Path, seed: int, proof: Proof) -> None:
    rng = random.Random(f"faults {seed}")
    with suffering(tmp_path, seed=seed) as subject:
        wanted = min(FAULTS_PER_BROKER, FAULTS - seed * FAULTS_PER_BROKER)
        while subject.reached < wanted:  # a fault of a start or a stop may name a call that is not made there
            assert subject.faults < 2 * wanted + 5, f"{subject.reached} of {subject.faults} faults were reached"
            fault, phase = random_fault(rng), rng.choice(PHASES)
            if phase == "start" or fault.calls == "fallocate":  # a running broker reuses its journal files
                subject.suffer_at_start(fault)
            elif phase == "stop":
                subject.suffer_at_stop(fault)
            else:
                state = subject.inject(fault)
                assert state == "healthy" or may_fence(fault), f"{fault}: the broker is {state}: {subject.output()}"
    proof("system-call faults tried", subject.faults)
    proof("system-call faults reached", subject.reached)
    proof("manifests judged for the order of syncs", subject.manifests)
    proof("records acknowledged under system-call faults", subject.ledger.acked_count)
