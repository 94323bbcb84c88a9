"""`headrace serve` with and without its Flight endpoint."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import ConfigError, LoginFailed
from headrace.flight.client import FlightClient, Servers
from headrace.server.addresses import require_caution
from headrace.server.config_sources import resolve
from tests.server.process import BrokerProcess, start_error

WITHOUT_ARROW = "import sys; sys.modules['pyarrow'] = None; from headrace.cli import main; main()"


def flight_address(broker: BrokerProcess) -> str:
    protocols = broker.ready["protocols"]
    assert isinstance(protocols, dict)
    (address,) = protocols["flight"]
    return str(address)


def test_the_endpoint_is_in_the_banner_and_in_the_ready_file(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--listen-flight", "127.0.0.1:0") as broker:
        address = flight_address(broker)
        with FlightClient(Servers.parse(address)) as flight_client:
            assert flight_client.topics() == []
        code, banner, _ = broker.stop(signal.SIGTERM)
        assert code == 0
        assert f"  flight {address:<22}flight\n" in banner


def test_a_taken_port_is_fatal_only_if_it_was_asked_for(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        words = start_error(tmp_path, "--listen-flight", f"127.0.0.1:{port}")
        assert words == f"cannot listen on 127.0.0.1:{port}: the port is taken by another process; --listen-flight chooses another"


def test_without_arrow_the_broker_starts_and_says_what_is_missing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_ARROW, "serve", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0"]
    done = subprocess.run([*command, "--duration", "0.1"], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "no Flight endpoint: listen.flight needs Arrow: pip install 'headrace[flight]'" in done.stdout
    assert "started without a default listener" in done.stderr
    explicit = subprocess.run(
        [*command, "--listen-flight", "127.0.0.1:0"], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert explicit.returncode == 2
    assert "listen.flight needs Arrow: pip install 'headrace[flight]'" in explicit.stderr


def test_an_empty_list_turns_the_endpoint_off_without_a_word(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        assert "flight" not in str(broker.ready["protocols"])
        _, banner, _ = broker.stop(signal.SIGTERM)
        assert "flight" not in banner


def test_enforced_access_asks_who_comes(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("a long password\n")
    secret.chmod(0o600)
    access = ("--set", "access.mode=enforced", "--set", f"access.admin_password_file={secret}")
    with BrokerProcess(tmp_path, "--listen-flight", "127.0.0.1:0", *access) as broker:
        address = flight_address(broker)
        with FlightClient(Servers.parse(address, user="admin", password="a long password")) as flight_client:
            flight_client.create_topic("t")
            assert flight_client.topics() == ["t"]
        with FlightClient(Servers.parse(address, user="admin", password="another")) as flight_client, pytest.raises(LoginFailed):
            flight_client.topics()
        with FlightClient(Servers.parse(address)) as flight_client:
            assert flight_client.topics() == []
        _, banner, errors = broker.stop(signal.SIGTERM)
        assert "a long password" not in banner + errors
        assert "Bearer" not in banner + errors


def test_importing_headrace_does_not_load_arrow() -> None:
    code = "import sys, headrace, headrace.cli; sys.exit('pyarrow' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300, check=False).returncode == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({}, "nothing is encrypted"),
        ({"tls.certificate": "c", "tls.key": "k"}, "every client may do everything"),
        ({"tls.certificate": "c", "tls.key": "k", "access.mode": "enforced"}, ""),
        (
            {"tls.certificate": "c", "tls.key": "k", "access.mode": "enforced", "flight.principal": "spark"},
            r"clients are not authenticated \(flight\)",
        ),
        ({"tls.certificate": "c", "tls.key": "k", "tls.client_ca": "a", "access.mode": "enforced", "flight.principal": "spark"}, ""),
    ],
)
def test_an_endpoint_beyond_loopback_needs_tls_and_authentication(more: dict[str, str], words: str) -> None:
    flags = {"listen.flight": ("--listen-flight", ["192.0.2.1:8815"]), **{name: (name, value) for name, value in more.items()}}
    config = resolve(flags=flags).config
    if words:
        with pytest.raises(ConfigError, match=words):
            require_caution(config)
    else:
        require_caution(config)
