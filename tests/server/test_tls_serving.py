"""A broker process with TLS: start, renewal, errors."""

from __future__ import annotations

import asyncio
import signal
import socket
import ssl
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace.clients.errors import ConnectFailed
from headrace.clients.fujin.client import FujinClient, FujinOptions
from headrace.clients.tls import TlsOptions
from headrace.server import certificates
from headrace.server.certificates import LEAF_DAYS
from headrace.server.tls import warn_of_expiry
from headrace.wire.figg import encode
from tests.server.process import DEADLINE_SECONDS, BrokerProcess, start_error
from tests.server.test_serve import wait_for_line


def certs(directory: Path, *names: str) -> Path:
    certificates.init(directory, names or ("localhost",), datetime.now(UTC))
    return directory


def tls(directory: Path, *more: str) -> list[str]:
    """Return the flags of a broker with these certificates."""
    chosen = [f"tls.certificate={directory / 'server.pem'}", f"tls.key={directory / 'server.key'}", *more]
    return [word for assignment in chosen for word in ("--set", assignment)]


def trusting(directory: Path, client: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
    if client:
        context.load_cert_chain(directory / f"{client}.pem", directory / f"{client}.key")
    return context


class Peer:
    """Send a Figg ping, with TLS or in plain text."""

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(address, timeout=300)
        if context is not None:
            self.socket = context.wrap_socket(self.socket, server_hostname="localhost")

    def ping(self) -> bool:
        self.socket.sendall(encode.ping(1))
        try:
            return self.socket.recv(64) == encode.pong(1)
        except OSError:
            return False

    def close(self) -> None:
        self.socket.close()


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_a_renewed_certificate_is_used_after_sighup_and_no_connection_is_dropped(tmp_path: Path, uvloop: bool) -> None:
    old, new = certs(tmp_path / "old"), certs(tmp_path / "new")
    with BrokerProcess(tmp_path, *tls(old), uvloop=uvloop) as broker:
        (address,) = broker.addresses
        staying = Peer(address, trusting(old))
        assert staying.ping()
        for name in ("server.pem", "server.key"):
            (new / name).replace(old / name)
        broker.process.send_signal(signal.SIGHUP)
        wait_for_line(broker, "certificate reloaded")
        arriving = Peer(address, trusting(new))
        assert arriving.ping() and staying.ping()
        with pytest.raises(ssl.SSLCertVerificationError):
            Peer(address, trusting(old))
        staying.close()
        arriving.close()
        assert broker.stop()[0] == 0


async def test_quic_uses_the_renewed_certificate_too(tmp_path: Path) -> None:
    old, new = certs(tmp_path / "old"), certs(tmp_path / "new")
    old_ca, new_ca = (TlsOptions(ca_file=directory / "ca.pem") for directory in (old, new))
    with BrokerProcess(tmp_path, *tls(old), "--listen-quic", "127.0.0.1:0") as broker:
        protocols = broker.ready["protocols"]
        assert isinstance(protocols, dict)
        port = int(protocols["quic"][0].rpartition(":")[2])
        staying = await FujinClient.connect("localhost", port, FujinOptions(tls=old_ca))
        await staying.publish("demo", b"before")
        for name in ("server.pem", "server.key"):
            (new / name).replace(old / name)
        broker.process.send_signal(signal.SIGHUP)
        await asyncio.to_thread(wait_for_line, broker, "certificate reloaded")
        async with await FujinClient.connect("localhost", port, FujinOptions(tls=new_ca)) as arriving:
            await arriving.publish("demo", b"after")
        with pytest.raises(ConnectFailed):
            await FujinClient.connect("localhost", port, FujinOptions(tls=old_ca))
        await staying.publish("demo", b"still here")
        await staying.close()


def test_a_renewed_certificate_is_noticed_without_a_signal(tmp_path: Path) -> None:
    old, new = certs(tmp_path / "old"), certs(tmp_path / "new")
    with BrokerProcess(tmp_path, *tls(old)) as broker:
        for name in ("server.key", "server.pem"):
            (new / name).replace(old / name)
        deadline = time.monotonic() + DEADLINE_SECONDS
        wait_for_line(broker, "certificate reloaded")
        assert time.monotonic() < deadline
        peer = Peer(broker.addresses[0], trusting(new))
        assert peer.ping()
        peer.close()


def test_sighup_without_tls_changes_nothing(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        broker.process.send_signal(signal.SIGHUP)
        wait_for_line(broker, "nothing to reload")
        peer = Peer(broker.addresses[0])
        assert peer.ping()
        peer.close()
        assert broker.stop()[0] == 0


def test_a_broken_renewal_is_reported_and_the_old_certificate_goes_on(tmp_path: Path) -> None:
    directory = certs(tmp_path / "certs")
    with BrokerProcess(tmp_path, *tls(directory)) as broker:
        (directory / "server.pem").write_text("garbage")
        broker.process.send_signal(signal.SIGHUP)
        wait_for_line(broker, "certificate not reloaded")
        peer = Peer(broker.addresses[0], trusting(directory))
        assert peer.ping()
        peer.close()


def test_plain_text_is_rejected_unless_it_is_optional(tmp_path: Path) -> None:
    directory = certs(tmp_path / "certs")
    with BrokerProcess(tmp_path, *tls(directory)) as broker:
        assert not Peer(broker.addresses[0]).ping()
        _, out, errors = broker.stop()
    assert "plain text on a TLS listener: 1" in errors
    assert "(TLS)" in out
    with BrokerProcess(tmp_path, *tls(directory, "tls.optional=true")) as broker:
        for context in (None, trusting(directory)):
            peer = Peer(broker.addresses[0], context)
            assert peer.ping()
            peer.close()
        _, out, _ = broker.stop()
    assert "(TLS or plain)" in out


def test_a_client_has_to_show_a_certificate_when_one_is_asked_for(tmp_path: Path) -> None:
    directory = certs(tmp_path / "certs")
    certificates.client(directory, "alice", datetime.now(UTC))
    with BrokerProcess(tmp_path, *tls(directory, f"tls.client_ca={directory / 'ca.pem'}")) as broker:
        peer = Peer(broker.addresses[0], trusting(directory, "alice"))
        assert peer.ping()
        peer.close()
        assert not Peer(broker.addresses[0], trusting(directory)).ping()
        _, _, errors = broker.stop()
    assert "TLS handshake failed: peer did not return a certificate" in errors


@pytest.mark.parametrize(
    ("days", "words"),
    [
        (-1, []),
        (LEAF_DAYS - 15, []),
        (LEAF_DAYS - 10, ["the certificate expires soon"]),
        (LEAF_DAYS, ["the certificate has expired"]),
    ],
)
def test_the_end_of_a_certificate_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture, days: int, words: list[str]) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    certificates.init(tmp_path, ["localhost"], now)
    warn_of_expiry(tmp_path / "server.pem", now + timedelta(days=days))
    assert [record.getMessage() for record in caplog.records] == words


def test_unusable_certificates_are_one_clear_line(tmp_path: Path) -> None:
    directory = certs(tmp_path / "certs")
    (directory / "server.key").chmod(0o644)
    text = start_error(tmp_path, *tls(directory))
    assert text == f"TLS: {directory / 'server.key'} can be read by others (mode 644); chmod 600 it"
    assert start_error(tmp_path, *tls(tmp_path)).endswith("server.key: No such file or directory")


def test_an_address_beyond_loopback_needs_tls_and_authentication(tmp_path: Path) -> None:
    directory = certs(tmp_path / "certs")
    text = start_error(tmp_path, "--listen", "0.0.0.0:0=figg,blipmq", *tls(directory))
    assert text == (
        "0.0.0.0:0=figg,blipmq can be reached from the network, and clients are not authenticated (figg): set tls.client_ca, "
        "or add --insecure to allow it"
    )
    text = start_error(tmp_path, "--listen", "0.0.0.0:0=blipmq", *tls(directory))
    assert "every client may do everything: set access.mode to enforced" in text
    for arguments in (
        ("--listen", "0.0.0.0:0=blipmq", *tls(directory, "access.mode=enforced")),
        ("--listen", "0.0.0.0:0", *tls(directory, f"tls.client_ca={directory / 'ca.pem'}", "access.mode=enforced")),
        ("--listen", "0.0.0.0:0", "--insecure", *tls(directory)),
    ):
        with BrokerProcess(tmp_path, *arguments) as broker:
            assert broker.stop()[0] == 0
