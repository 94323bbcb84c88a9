"""The Fujin door of a broker process: where it is, whom it shows itself as, what survives, and when it is refused."""

from __future__ import annotations

import re
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

import headrace
from headrace.clients.errors import ConnectFailed, Refused
from headrace.clients.fujin import FujinClient, FujinOptions
from headrace.clients.tls import TlsOptions
from headrace.errors import ConfigError
from headrace.server import certificates
from headrace.server.quic import readers, writers
from headrace.sessions.fujin_settings import ReaderConnector
from tests.net.polling import until
from tests.server.process import BrokerProcess, refusal

QUIC = ("--listen-quic", "127.0.0.1:0")


def quic_port(broker: BrokerProcess) -> int:
    doors = broker.ready["doors"]
    assert isinstance(doors, dict)
    (address,) = doors["quic"]
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
        assert code == 0 and "cut off" not in errors


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, *QUIC) as broker:
        line = refusal(tmp_path, "--listen-quic", f"127.0.0.1:{quic_port(broker)}", data=tmp_path / "other")  # type: ignore[arg-type]
        assert line.startswith(f"cannot listen on 127.0.0.1:{quic_port(broker)}: the port is taken")


def test_an_address_beyond_loopback_has_to_be_meant(tmp_path: Path) -> None:
    assert "nobody is asked who they are (fujin)" in refusal(tmp_path, "--listen-quic", "0.0.0.0:0")


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

        assert "no certificate was shown" in await refused(None)
        assert "certificate verify failed" in await refused(tmp_path / "foreign" / "mallory")
        assert "names no client" in await refused(tmp_path / "certs" / "server")
        url = f"fujin://localhost:{quic_port(broker)}"
        async with headrace.connect(url, options=FujinOptions(tls=shown(tmp_path, tmp_path / "certs" / "alice"))) as alice:
            with pytest.raises(Refused, match="alice"):
                await alice.publish("orders", b"alice has no rights yet, and is known by name")


async def test_a_client_without_a_certificate_is_the_principal_of_the_door(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, *QUIC, "--set", "access.mode=enforced", "--set", "fujin.principal=lorries") as broker:
        async with await FujinClient.connect("127.0.0.1", quic_port(broker)) as client:
            with pytest.raises(Refused, match="lorries may not publish topic 'orders'") as refused:
                await client.publish("orders", b"x")
            assert refused.value.kind == "not_authorized"


def guarded(certs: Path) -> list[str]:
    """Flags of a broker that wants to know who comes, and what they may do."""
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


def test_connectors_are_read_from_lines() -> None:
    assert writers(("pub=orders",)) == {"pub": "orders"}
    assert readers(("sub=a+b;group=g;start=latest", "x=y")) == {
        "sub": ReaderConnector(("a", "b"), "g", "latest"),
        "x": ReaderConnector(("y",), "x"),
    }


@pytest.mark.parametrize("line", ["sub", "=t", "sub=", "sub=t;start=middle", "sub=t;group=", "sub=t;colour=red"])
def test_a_connector_that_cannot_be_read_is_named(line: str) -> None:
    with pytest.raises(ConfigError, match="fujin.readers"):
        readers((line,))
