"""Notifications to the supervisor: one datagram each, to a path or an abstract address; failures are ignored."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import pytest

from headrace.server.ready import notify


@pytest.mark.parametrize("abstract", [False, True])
def test_a_state_is_one_datagram(tmp_path: Path, abstract: bool) -> None:
    name = f"@headrace-test-{os.getpid()}" if abstract else str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(f"\0{name[1:]}" if abstract else name)
        supervisor.settimeout(300)
        notify("READY=1", {"NOTIFY_SOCKET": name})
        assert supervisor.recv(100) == b"READY=1"


@pytest.mark.parametrize("environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:2:1"}])
def test_without_a_socket_nothing_happens(environment: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    notify("READY=1", environment)
    assert caplog.records == []


def test_a_supervisor_that_is_gone_is_logged_and_no_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        notify("READY=1", {"NOTIFY_SOCKET": str(tmp_path / "gone")})
    [record] = caplog.records
    assert record.getMessage() == "supervisor not notified" and record.__dict__["reason"] == "No such file or directory"
