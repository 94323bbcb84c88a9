"""Faults that once stopped the broker, or that represent a class of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash.serving import SMALL
from tests.faults.harness import FaultyBroker, suffering
from tests.faults.injection import Fault

pytestmark = [pytest.mark.kill_loop, pytest.mark.xdist_group("named faults")]


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyBroker]:
    """One broker for all faults that must pass without a restart."""
    with suffering(tmp_path_factory.mktemp("faults")) as subject:
        yield subject
        assert subject.lives == 1, "some fault ended the first life"


def test_running_out_of_descriptors_never_fences_the_log(subject: FaultyBroker) -> None:
    for fault in (
        Fault("openat", "error=EMFILE", "1"),
        Fault("openat", "error=ENFILE", "2"),
        Fault("openat", "error=ENOMEM", "1"),
        Fault("openat", "error=EMFILE", "1..8"),
    ):
        assert subject.inject(fault) == "healthy", fault


def test_a_failed_look_at_the_free_space_does_not_end_maintenance(subject: FaultyBroker) -> None:
    assert subject.inject(Fault("statfs", "error=EIO", "1..2")) == "healthy"


def test_maintenance_survives_a_thread_that_cannot_be_started(subject: FaultyBroker) -> None:
    assert subject.inject(Fault("clone,clone3", "error=EAGAIN", "1..3")) == "healthy"


def test_a_failed_accept_does_not_end_the_listener(subject: FaultyBroker) -> None:
    for error in ("EMFILE", "ENFILE", "ECONNABORTED", "ENOBUFS", "ENOMEM"):
        assert subject.inject(Fault("accept4", f"error={error}", "1..5")) == "healthy", error


def test_a_disk_without_room_is_full_for_as_long_as_that_lasts(subject: FaultyBroker) -> None:
    for call in ("pwritev2", "mkdir"):
        assert subject.inject(Fault(call, "error=ENOSPC", "1+")) == "healthy", call


def test_one_full_directory_sync_of_a_journal_roll_is_no_end(subject: FaultyBroker) -> None:
    """A failed directory sync does not concern the data in the file, so it may be retried."""
    assert subject.inject(Fault("fsync", "error=ENOSPC", "1")) == "healthy"


@pytest.mark.parametrize("when", ["1", "9"])
def test_a_failed_sync_fences_and_the_next_start_has_everything(tmp_path: Path, when: str) -> None:
    with suffering(tmp_path) as subject:
        assert subject.inject(Fault("fdatasync", "error=EIO", when)) == "fenced"


@pytest.mark.parametrize("calls", ["fdatasync", "openat"])
def test_a_manifest_never_vouches_for_a_segment_whose_sync_failed(tmp_path: Path, calls: str) -> None:
    """The closing checkpoint once forgot which segments were still to be synced."""
    error = {"fdatasync": "EIO", "openat": "EMFILE"}[calls]
    with suffering(tmp_path) as subject:
        subject.suffer_at_stop(Fault(calls, f"error={error}", "1"))
        assert subject.reached == 1


def test_a_slow_disk_delays_and_breaks_nothing(subject: FaultyBroker) -> None:
    faults = [Fault(call, "delay_enter=20000", "1+5") for call in ("fdatasync", "pwritev2", "fsync")]
    assert subject.inject(*faults) == "healthy"


def test_a_broker_without_room_for_a_journal_starts_serves_reads_and_says_so(tmp_path: Path) -> None:
    with suffering(tmp_path) as subject:
        subject.publish()
        # Replayed journal files are reused, if they have the size of the settings.
        settings = {**SMALL, "HEADRACE__STORAGE__JOURNAL_SIZE": "2 MiB"}
        state = subject.suffer_at_start(Fault("fallocate", "error=ENOSPC", "1+"), killed=True, settings=settings)
        assert state == "full" and "no room for the journal" in subject.output(), subject.output()
