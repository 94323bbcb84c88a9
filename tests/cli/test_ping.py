"""`headrace ping`: one reply through each protocol, and exit codes for health checks."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import TOO_SLOW, UNAVAILABLE
from tests.server.process import BrokerProcess

KEY = "k" * 32


def ping(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", "ping", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env={"HEADRACE_API_KEY": "env:KEY", "KEY": KEY}
    )


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory: Path = tmp_path_factory.mktemp("broker")
    with BrokerProcess(directory, "--listen-quic", "127.0.0.1:0", "--blipmq-key", "env:BLIPMQ", BLIPMQ=KEY) as started:
        yield started


@pytest.mark.parametrize("protocol", ["figg", "rustlog", "blipmq", "flymq", "fujin"])
def test_a_broker_answers_through_every_protocol(broker: BrokerProcess, protocol: str) -> None:
    protocols = broker.ready["protocols"]
    assert isinstance(protocols, dict)
    [address] = protocols["quic" if protocol == "fujin" else "tcp"]
    done = ping("--server", f"{protocol}://{address}")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{protocol}://{address} replied in \d+\.\d ms\n", done.stdout)


def test_quiet_says_nothing(broker: BrokerProcess) -> None:
    host, port = broker.addresses[0]
    done = ping("--server", f"{host}:{port}", "-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_broker_is_exit_code_5() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused, and the port stays reserved
        done = ping("--server", f"127.0.0.1:{holder.getsockname()[1]}")
    assert done.returncode == UNAVAILABLE
    assert "cannot connect" in done.stderr and done.stderr.count("\n") == 1


def test_a_broker_that_does_not_answer_is_exit_code_6() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        done = ping("--server", f"127.0.0.1:{port}", "--timeout", "200ms")
    assert (done.returncode, done.stdout) == (TOO_SLOW, "")
    assert done.stderr == f"headrace: flymq://127.0.0.1:{port} did not reply within 0.2 s\n"
