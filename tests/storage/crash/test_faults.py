"""Each disk call fails once, in turn, in a workload with all operations.

HEADRACE_FAULTS=all takes every call; the normal suite takes a sample.
"""

from __future__ import annotations

import errno
import itertools
import os
from dataclasses import replace

import pytest

from headrace.storage.files import EXHAUSTED_ERRNOS
from headrace.storage.partition import LogOptions
from tests.conftest import Proof
from tests.storage.crash.trouble import endure
from tests.storage.crash.workload import Shape
from tests.storage_faults.simulated import Fault

pytestmark = pytest.mark.crash_images

STEP = 1 if os.environ.get("HEADRACE_FAULTS") == "all" else 3
SHAPE = Shape(
    "troubled",
    {},
    logs=3,
    options=LogOptions(segment_bytes=400, retention_bytes=1500, tombstone_retention_ms=1),
    compacted=1,
    journal_bytes=12 * 1024,
    sizes=(1, 100, 500),
)
STEPS = (
    *("append", "atomic", "checkpoint", "append", "append_written", "append", "maintain", "atomic", "append", "checkpoint", "delete"),
    *(
        "append",
        "atomic",
        "checkpoint",
        "reopen",
        "append",
        "append_unacked",
        "die",
        "append",
        "maintain",
        "append",
        "checkpoint",
        "append",
    ),
)
FULL = ("write_at", "allocate", "create", "make_dir", "rename", "sync", "sync_dir")
"""Calls that may fail for lack of space."""
EXHAUSTED = ("open", "open_readonly", "create", "list", "make_dir", "rename", "remove", "write_at", "allocate", "sync_dir")
"""Calls that may fail for lack of descriptors or memory. A file sync is not among them, because its failure leaves an unknown state."""
LARGE = replace(SHAPE, large_bytes=150)
"""Most appends are large."""
PARTS = 3
"""The longest test is split for xdist: each part takes every third call."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from then on"])
def test_a_failing_disk_breaks_no_promise(persistent: bool, part: int, proof: Proof) -> None:
    sites: set[tuple[str, str]] = set()
    for nth in itertools.count(1 + part * STEP, PARTS * STEP):
        files, images = endure(SHAPE, STEPS, Fault("*", nth, error=errno.EIO, persistent=persistent))
        proof("crash images recovered", images)
        if not files.fired:
            break
        sites.update((fired.kind, fired.site) for fired in files.fired)
        proof("disk faults endured", 1)
    assert len(sites) > 20, "the faults hit only a few of the places that use the disk"


@pytest.mark.parametrize("kind", FULL)
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from then on"])
def test_a_full_disk_breaks_no_promise(kind: str, persistent: bool, proof: Proof) -> None:
    for nth in itertools.count(1, STEP):
        files, images = endure(SHAPE, STEPS, Fault(kind, nth, error=errno.ENOSPC, persistent=persistent, kept_bytes=nth * 7 % 100))
        proof("crash images recovered", images)
        if not files.fired:
            break
        proof("disk faults endured", 1)


@pytest.mark.parametrize("kind", EXHAUSTED)
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "from then on"])
def test_want_of_descriptors_or_memory_breaks_no_promise_and_ends_nothing(kind: str, persistent: bool, proof: Proof) -> None:
    for nth in itertools.count(1, STEP):
        error = sorted(EXHAUSTED_ERRNOS)[nth % len(EXHAUSTED_ERRNOS)]
        fault = Fault(kind, nth, error=error, persistent=persistent, kept_bytes=nth * 7 % 100)
        files, images = endure(SHAPE, STEPS, fault, fences=False)
        proof("crash images recovered", images)
        if not files.fired:
            break
        proof("disk faults endured", 1)


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EMFILE], ids=errno.errorcode.__getitem__)
@pytest.mark.parametrize("kind", ["write_at", "truncate", "create", "sync"])
def test_a_failing_disk_breaks_no_promise_of_large_appends(kind: str, error: int, proof: Proof) -> None:
    for nth in itertools.count(1, STEP):
        files, images = endure(LARGE, STEPS, Fault(kind, nth, error=error, kept_bytes=nth * 7 % 100), images_max=6)
        proof("crash images recovered", images)
        if not files.fired:
            break
        proof("disk faults endured", 1)
