"""`headrace serve` with and without its bulk lane."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.bulk.client import BulkClient, Servers
from headrace.errors import ConfigError, LoginFailed
from headrace.server.addresses import require_caution
from headrace.server.config import resolve
from tests.server.process import BrokerProcess, refusal

WITHOUT_ARROW = "import sys; sys.modules['pyarrow'] = None; from headrace.cli import main; main()"


def bulk_address(broker: BrokerProcess) -> str:
    doors = broker.ready["doors"]
    assert isinstance(doors, dict)
    (address,) = doors["bulk"]
    return str(address)


def test_the_lane_is_in_the_banner_and_in_the_ready_file(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--bulk", "127.0.0.1:0") as broker:
        address = bulk_address(broker)
        with BulkClient(Servers.parse(address)) as bulk:
            assert bulk.topics() == []
        code, banner, _ = broker.stop(signal.SIGTERM)
        assert code == 0
        assert f"  bulk {address:<22}flight\n" in banner


def test_a_taken_port_is_fatal_only_if_it_was_asked_for(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        words = refusal(tmp_path, "--bulk", f"127.0.0.1:{port}")
        assert words == f"cannot listen on 127.0.0.1:{port}: the port is taken by another process; --bulk chooses another"


def test_without_arrow_the_broker_starts_and_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_ARROW, "serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    done = subprocess.run([*command, "--duration", "0.1"], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no bulk lane: listen.bulk needs Arrow: pip install 'headrace[bulk]'" in done.stdout
    asked = subprocess.run([*command, "--bulk", "127.0.0.1:0"], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert asked.returncode == 2
    assert "listen.bulk needs Arrow: pip install 'headrace[bulk]'" in asked.stderr


def test_an_empty_list_turns_the_lane_off_without_a_word(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        assert "bulk" not in str(broker.ready["doors"])
        _, banner, _ = broker.stop(signal.SIGTERM)
        assert "bulk" not in banner


def test_enforced_access_asks_who_comes(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("a long password\n")
    secret.chmod(0o600)
    access = ("--set", "access.mode=enforced", "--set", f"access.admin_password_file={secret}")
    with BrokerProcess(tmp_path, "--bulk", "127.0.0.1:0", *access) as broker:
        address = bulk_address(broker)
        with BulkClient(Servers.parse(address, user="admin", password="a long password")) as bulk:
            bulk.create_topic("t")
            assert bulk.topics() == ["t"]
        with BulkClient(Servers.parse(address, user="admin", password="another")) as bulk, pytest.raises(LoginFailed):
            bulk.topics()
        with BulkClient(Servers.parse(address)) as bulk:
            assert bulk.topics() == []
        _, banner, errors = broker.stop(signal.SIGTERM)
        assert "a long password" not in banner + errors
        assert "Bearer" not in banner + errors


def test_importing_headrace_does_not_load_arrow() -> None:
    code = "import sys, headrace, headrace.cli; sys.exit('pyarrow' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "nothing is encrypted"),
        ({"tls.certificate": "c", "tls.key": "k"}, "everybody may do everything"),
        ({"tls.certificate": "c", "tls.key": "k", "access.mode": "enforced"}, ""),
        (
            {"tls.certificate": "c", "tls.key": "k", "access.mode": "enforced", "bulk.principal": "spark"},
            r"nobody is asked who they are \(flight\)",
        ),
        ({"tls.certificate": "c", "tls.key": "k", "tls.client_ca": "a", "access.mode": "enforced", "bulk.principal": "spark"}, ""),
    ],
)
def test_a_lane_beyond_loopback_is_sealed_and_guarded(more: dict[str, str], words: str) -> None:
    flags = {"listen.bulk": ("--bulk", ["192.0.2.1:8815"]), **{name: (name, value) for name, value in more.items()}}
    config = resolve(flags=flags).config
    if words:
        with pytest.raises(ConfigError, match=words):
            require_caution(config)
    else:
        require_caution(config)
