"""Changes of the broker's health are logged."""

from __future__ import annotations

import logging

import pytest

from headrace.server.wiring import _log_health
from headrace.storage.health import Health


def test_each_change_of_health_is_logged_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headrace")
    logging.getLogger("headrace").propagate = True
    health = Health()
    health.changed = _log_health
    for _ in range(3):
        health.failed("log maintenance", "Too many open files")
    health.succeeded("log maintenance")
    health.succeeded("log maintenance")
    health.ended("syncing the journal failed")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "ERROR"]
    assert "log maintenance: Too many open files" in str(vars(caplog.records[0])["problems"])
    assert "syncing the journal failed" in str(vars(caplog.records[2])["problems"])
