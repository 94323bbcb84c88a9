"""The QUIC listener of a broker process: address, certificate, restart, errors."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import headrace
from headrace.clients.errors import ConnectFailed, Refused
from headrace.clients.fujin.client import FujinClient, FujinOptions
from headrace.clients.tls import TlsOptions
from headrace.errors import ConfigError
from headrace.server import certificates
from headrace.server.config_sources import resolve
from headrace.server.quic import readers, writers
from headrace.sessions.fujin.settings import ReaderConnector
from tests.net.polling import until
from tests.server.process import BrokerProcess, start_error

QUIC = ("--listen-quic", "127.0.0.1:0")


def quic_port(broker: BrokerProcess) -> int:
    protocols = broker.ready["protocols"]
    assert isinstance(protocols, dict)
    (address,) = protocols["quic"]
    return int(address.rpartition(":")[2])


def fingerprint(out: str) -> str:
    found = re.search(r"quic .* fujin .*self-signed certificate SHA-256 ([0-9a-f]{64})", out)
    assert found is not None, out
    return found[1]


@pytest.mark.parametrize("uvloop", [True, False])
async def test_what_was_acknowledged_survives_a_kill_and_so_does_the_certificate(tmp_path: Path, uvloop: bool) -> None:
    with BrokerProcess(tmp_path, *QUIC, uvloop=uvloop) as broker:
        async with await FujinClient.connect("127.0.0.1", quic_port(broker)) as client:
            await client.publish_many("orders", [b"%d" % number for number in range(1_000)])
        _, out, _ = broker.stop(signal.SIGKILL)
    with BrokerProcess(tmp_path, *QUIC, uvloop=uvloop) as broker:
        options = FujinOptions(fingerprint=fingerprint(out))
        async with await FujinClient.connect("127.0.0.1", quic_port(broker), options) as client:
            subscription = await client.subscribe("orders", settlement="auto")
            found = [(await anext(subscription)).value for _ in range(1_000)]
            assert found == [b"%d" % number for number in range(1_000)]
        code, again, _ = broker.stop()
        assert code == 0 and fingerprint(again) == fingerprint(out)


async def test_a_drain_asks_the_client_to_go(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, *QUIC) as broker:
        client = await FujinClient.connect("127.0.0.1", quic_port(broker), FujinOptions(backoff=lambda attempt: 60.0))
        await client.subscribe("orders")
        await client.publish("orders", b"x")
        broker.process.send_signal(signal.SIGTERM)
        await until(lambda: not client.is_connected)
        client.abandon()
        code, _, errors = broker.ended()
        assert code == 0 and "did not finish in time" not in errors


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, *QUIC) as broker:
        line = start_error(tmp_path, "--listen-quic", f"127.0.0.1:{quic_port(broker)}", data=tmp_path / "other")  # type: ignore[arg-type]
        assert line.startswith(f"cannot listen on 127.0.0.1:{quic_port(broker)}: the port is taken")


def test_an_address_beyond_loopback_has_to_be_meant(tmp_path: Path) -> None:
    assert "clients are not authenticated (fujin)" in start_error(tmp_path, "--listen-quic", "0.0.0.0:0")


async def test_a_client_is_who_its_certificate_says(tmp_path: Path) -> None:
    certificates.init(tmp_path / "certs", ("localhost",), datetime.now(UTC))
    certificates.client(tmp_path / "certs", "alice", datetime.now(UTC))
    certificates.init(tmp_path / "foreign", ("localhost",), datetime.now(UTC))
    certificates.client(tmp_path / "foreign", "mallory", datetime.now(UTC))
    with BrokerProcess(tmp_path, *QUIC, *guarded(tmp_path / "certs")) as broker:

        async def refused(certificate: Path | None) -> str:
            with pytest.raises(ConnectFailed) as failure:
                await headrace.connect(f"fujin://localhost:{quic_port(broker)}", options=FujinOptions(tls=shown(tmp_path, certificate)))
            return str(failure.value)

        assert "no client certificate was presented" in await refused(None)
        assert "certificate verify failed" in await refused(tmp_path / "foreign" / "mallory")
        assert "the certificate contains no client name" in await refused(tmp_path / "certs" / "server")
        url = f"fujin://localhost:{quic_port(broker)}"
        async with headrace.connect(url, options=FujinOptions(tls=shown(tmp_path, tmp_path / "certs" / "alice"))) as alice:
            with pytest.raises(Refused, match="alice"):
                await alice.publish("orders", b"alice has no rights yet, and is known by name")


async def test_a_client_without_a_certificate_is_the_principal_of_the_protocol(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, *QUIC, "--set", "access.mode=enforced", "--set", "fujin.principal=lorries") as broker:
        async with await FujinClient.connect("127.0.0.1", quic_port(broker)) as client:
            with pytest.raises(Refused, match="lorries may not publish topic 'orders'") as refused:
                await client.publish("orders", b"x")
            assert refused.value.kind == "not_authorized"


def guarded(certs: Path) -> list[str]:
    """Return the flags of a broker with client certificates and enforced access."""
    chosen = {
        "tls.certificate": certs / "server.pem",
        "tls.key": certs / "server.key",
        "tls.client_ca": certs / "ca.pem",
        "access.mode": "enforced",
    }
    return [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]


def shown(directory: Path, certificate: Path | None) -> TlsOptions:
    ca = directory / "certs" / "ca.pem"
    return TlsOptions(ca) if certificate is None else TlsOptions(ca, certificate.with_suffix(".pem"), certificate.with_suffix(".key"))


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = tmp_path / "shadow" / "aioquic"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_text("raise ImportError('gone', name='aioquic')\n")
    path = f"{shadow.parent}:{':'.join(path for path in sys.path if path.endswith('src'))}"
    ended = BrokerProcess(tmp_path, *QUIC, PYTHONPATH=path).ended()
    assert ended == (2, "", "headrace: listen.quic needs aioquic: pip install 'headrace[quic]'\n")


WITHOUT_AIOQUIC = "import sys; sys.modules['aioquic'] = None; from headrace.cli import main; main()"


def test_quic_listens_on_the_fujin_port_by_default() -> None:
    assert [str(bind) for bind in resolve().config.listen.quic] == ["127.0.0.1:4848"]


def start_on_the_default_port(tmp_path: Path, port: int, code: str) -> subprocess.CompletedProcess[str]:
    """Run `headrace serve` for a moment, with another default port: the real one is shared by the whole machine."""
    patch = (
        "from headrace.server import config; bind = config.SETTINGS['listen.quic'].default[0]; "
        f"object.__setattr__(bind.address, 'port', {port}); "
    )
    command = [
        sys.executable,
        "-c",
        patch + code,
        "serve",
        "--data",
        str(tmp_path / "data"),
        "--listen",
        "127.0.0.1:0",
        "--duration",
        "0.1",
    ]
    environment = {**os.environ, "HEADRACE__LISTEN__FLIGHT": "", "HEADRACE__LISTEN__HTTP": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path, env=environment)


def test_the_default_listener_opens(tmp_path: Path) -> None:
    done = start_on_the_default_port(tmp_path, 0, "from headrace.cli import main; main()")
    assert done.returncode == 0, done.stderr
    assert re.search(r"  quic +127\.0\.0\.1:\d+ +fujin  \(TLS, self-signed", done.stdout), done.stdout
    assert "started without" not in done.stderr


def test_the_broker_starts_without_quic_if_the_default_port_is_taken(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        done = start_on_the_default_port(tmp_path, port, "from headrace.cli import main; main()")
    assert done.returncode == 0, done.stderr
    reason = f"cannot listen on 127.0.0.1:{port}: the port is taken by another process; --listen-quic chooses another"
    assert f"  no QUIC listener: {reason}\n" in done.stdout
    assert "started without a default listener" in done.stderr and reason in done.stderr


def test_the_broker_starts_without_quic_if_the_library_is_missing(tmp_path: Path) -> None:
    done = start_on_the_default_port(tmp_path, 0, WITHOUT_AIOQUIC)
    assert done.returncode == 0, done.stderr
    assert "  no QUIC listener: listen.quic needs aioquic: pip install 'headrace[quic]'\n" in done.stdout
    assert "started without a default listener" in done.stderr


def test_connectors_are_read_from_lines() -> None:
    assert writers(("pub=orders",)) == {"pub": "orders"}
    assert readers(("sub=a+b;group=g;start=latest", "x=y", "z=y;mode=ordered")) == {
        "sub": ReaderConnector(("a", "b"), "g", "latest"),
        "x": ReaderConnector(("y",), "x"),
        "z": ReaderConnector(("y",), "z", mode="ordered"),
    }


@pytest.mark.parametrize("line", ["sub", "=t", "sub=", "sub=t;start=middle", "sub=t;group=", "sub=t;mode=any", "sub=t;colour=red"])
def test_a_connector_that_cannot_be_read_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="fujin.readers"):
        readers((line,))
