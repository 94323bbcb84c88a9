"""The examination of a configuration and of a machine: each finding, and what to do."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import pytest

from headrace.server import doctor
from headrace.server.doctor import Finding, Level, examine
from headrace.storage.files import DiskFiles


def findings(tmp_path: Path, *, file: Path | None = None, java: str = "21", **flags: object) -> dict[str, Finding]:
    chosen = {name.replace("__", "."): (name, value) for name, value in flags.items()}
    chosen = {"storage.path": ("--data", str(tmp_path / "data")), "listen.tcp": ("--listen", ["127.0.0.1:0"]), **chosen}
    found = examine(file, {**chosen, "listen.quic": ("q", []), "listen.flight": ("f", [])}, {}, java=java)
    return {finding.check: finding for finding in found}


def actions(found: dict[str, Finding]) -> list[str]:
    return [finding.check for finding in found.values() if finding.level is Level.ACTION]


def test_a_good_machine_needs_no_action(tmp_path: Path) -> None:
    found = findings(tmp_path, storage__headroom="0")
    assert actions(found) == []
    assert {"configuration", "data directory", "disk space", "disk sync", "port 127.0.0.1:0", "clock", "open files", "Java"} <= set(found)
    assert list(tmp_path.iterdir()) == []


def test_mistakes_of_the_configuration_are_findings_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[storage]\nakc = 1\n")
    found = findings(tmp_path, file=file)
    assert found["configuration"].text.startswith(f"{file}:2: unknown key") and "configuration" in actions(found)


def test_an_address_that_needs_caution_is_a_finding(tmp_path: Path) -> None:
    found = findings(tmp_path, listen__tcp=["0.0.0.0:0"])
    assert "can be reached from the network" in found["configuration"].text and "configuration" in actions(found)


def test_a_port_in_use_needs_action_unless_the_broker_of_this_directory_runs(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = findings(tmp_path, listen__tcp=[address])
        assert found[f"port {address}"].level is Level.ACTION and "listen.tcp" in found[f"port {address}"].advice
        (tmp_path / "data").mkdir()
        files = DiskFiles(tmp_path / "data")
        files.lock()
        try:
            found = findings(tmp_path, listen__tcp=[address])
        finally:
            files.close()
        assert found[f"port {address}"].level is found["data directory"].level is Level.NOTE


def test_too_little_space_needs_action(tmp_path: Path) -> None:
    assert actions(findings(tmp_path, storage__headroom="1024 GiB")) == ["disk space"]


def test_a_slow_disk_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_sync_times", lambda directory: [30.0, 50.0, 31.0])
    found = findings(tmp_path)["disk sync"]
    assert (found.level, found.text) == (Level.NOTE, "median 31.0 ms, slowest 50.0 ms of 3")


def test_a_disk_that_cannot_sync_needs_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: Path) -> list[float]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(doctor, "_sync_times", fail)
    assert "disk sync" in actions(findings(tmp_path))


def test_a_low_limit_of_open_files_needs_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 1024))
    found = findings(tmp_path)["open files"]
    assert found.level is Level.ACTION and "LimitNOFILE" in found.advice


def test_a_clock_that_is_years_off_needs_action_and_one_without_ntp_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    [old] = doctor._clock(now=lambda: 0.0)
    assert (old.level, old.text) == (Level.ACTION, "it is 1970-01-01")
    monkeypatch.setattr(doctor, "_adjtimex", lambda: 5)
    assert [finding.level for finding in doctor._clock()] == [Level.NOTE]
    monkeypatch.setattr(doctor, "_adjtimex", lambda: 0)
    assert [finding.level for finding in doctor._clock()] == [Level.OK]


def test_missing_extras_are_noted_and_old_java_needs_action_where_spark_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_is_installed", lambda name: name != "aioquic")
    found = findings(tmp_path, java="11", storage__headroom="0")
    assert (found["extra quic"].level, found["extra spark"].level) == (Level.NOTE, Level.OK)
    assert "headrace[quic]" in found["extra quic"].advice
    assert actions(found) == ["Java"] and found["Java"].text == "version 11"
    monkeypatch.setattr(doctor, "_is_installed", lambda name: False)
    assert findings(tmp_path, java="absent", storage__headroom="0")["Java"].level is Level.NOTE


def test_a_directory_of_another_user_needs_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert actions(findings(tmp_path)) == ["data directory"]
