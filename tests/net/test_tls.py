"""TLS on a listener: accepted clients, their names, and the errors of the others."""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from headrace.net.listener import Listener, NetLimits
from headrace.net.tls import Tls, TlsSettings, TlsUnusable, identity_of
from tests.net.polling import WAIT_SECONDS, until
from tests.net.proxy import FaultProxy
from tests.net.test_listener import Echo, Sessions, starts_with

CA = trustme.CA()
OTHER_CA = trustme.CA()
PAST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)


def files(directory: Path, certificate: trustme.LeafCert | None = None, **chosen: object) -> TlsSettings:
    certificate = certificate or CA.issue_cert("localhost")
    directory.mkdir(exist_ok=True)
    chain, key, trusted = directory / "server.pem", directory / "server.key", directory / "clients.pem"
    chain.write_bytes(b"".join(part.bytes() for part in certificate.cert_chain_pems))
    key.touch(0o600)
    key.write_bytes(certificate.private_key_pem.bytes())
    CA.cert_pem.write_to_path(trusted)
    return TlsSettings(chain, key, trusted if chosen.pop("mutual", False) else None, **chosen)  # type: ignore[arg-type]  # keywords of it


def client(certificate: trustme.LeafCert | None = None, trusts: trustme.CA = CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    trusts.configure_trust(context)
    if certificate is not None:
        certificate.configure_cert(context)
    return context


@asynccontextmanager
async def listening(sessions: Sessions, settings: TlsSettings | None, limits: NetLimits = NetLimits()) -> AsyncIterator[Listener]:
    tls = None if settings is None else Tls(settings)
    listener = await Listener.open("127.0.0.1", 0, [sessions.protocol], limits, None, tls)
    try:
        yield listener
    finally:
        await listener.drain(0.0)


async def connect(
    listener: Listener | FaultProxy, context: ssl.SSLContext | None = None
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(listener.host, listener.port, ssl=context, server_hostname="localhost" if context else None)


async def echoed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes = b"hello") -> bytes:
    writer.write(text)
    async with asyncio.timeout(WAIT_SECONDS):
        return await reader.readexactly(len(text))


async def expect_rejection(listener: Listener, context: ssl.SSLContext | None) -> None:
    """Connect, send, and expect that the connection is closed without a reply."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            reader, writer = await connect(listener, context)
            writer.write(b"hello")
            assert await reader.read() == b""
        writer.close()
    except (ssl.SSLError, ConnectionError):
        pass


async def test_bytes_of_any_size_go_in_and_out_encrypted(tmp_path: Path) -> None:
    sessions = Sessions()
    async with listening(sessions, files(tmp_path)) as listener:
        reader, writer = await connect(listener, client())
        text = os.urandom(3_000_001)
        assert await echoed(reader, writer, text) == text
        assert writer.get_extra_info("ssl_object").version() == "TLSv1.3"
        assert listener.counters.opened_with_tls == 1
        assert listener.counters.bytes_in > len(text)
        assert sessions.opened[0].link.identity is None  # type: ignore[attr-defined]  # the link is a peer
        writer.close()


async def test_a_handshake_cut_anywhere_is_the_same_handshake(tmp_path: Path) -> None:
    async with listening(Sessions(), files(tmp_path)) as listener, FaultProxy(listener.host, listener.port) as proxy:
        proxy.chunk_bytes = 1
        reader, writer = await connect(proxy, client())
        assert await echoed(reader, writer) == b"hello"
        writer.close()


async def test_a_protocol_is_found_behind_tls_however_its_first_bytes_are_cut(tmp_path: Path) -> None:
    sessions = Sessions(sniff=starts_with(b"abc"))
    other = Sessions("other", sniff=starts_with(b"abd"))
    listener = await Listener.open("127.0.0.1", 0, [other.protocol, sessions.protocol], tls=Tls(files(tmp_path)))
    reader, writer = await connect(listener, client())
    for letter in (b"a", b"b", b"c"):
        writer.write(letter)
        await writer.drain()
    assert await reader.readexactly(3) == b"abc"
    writer.close()
    await listener.drain(0.0)


async def test_what_a_session_said_last_arrives_and_the_end_is_a_clean_one(tmp_path: Path) -> None:
    class Farewell(Echo):
        def receive(self, data: bytes) -> None:
            self.link.send(b"x" * 1_000_000)
            self.link.close("done", error=False)

    async with listening(Sessions(make=Farewell), files(tmp_path)) as listener:
        # A plain socket reads on to the very end; an event loop's own TLS may give up with bytes unread.
        assert await asyncio.to_thread(_read_to_the_end, listener) == 1_000_000
        await until(lambda: listener.counters.open == 0)
        assert listener.counters.closed == {"done": 1}


def _read_to_the_end(listener: Listener) -> int:
    with (
        socket.create_connection((listener.host, listener.port), timeout=WAIT_SECONDS) as plain,
        client().wrap_socket(plain, server_hostname="localhost", suppress_ragged_eofs=False) as sealed,
    ):
        sealed.sendall(b"hello")
        return sum(len(chunk) for chunk in iter(lambda: sealed.recv(65_536), b""))


async def test_a_peer_that_ends_its_half_still_gets_what_was_under_way(tmp_path: Path) -> None:
    sessions = Sessions()
    async with listening(sessions, files(tmp_path)) as listener:
        reader, writer = await connect(listener, client())
        await echoed(reader, writer)
        writer.close()  # TLS closes by saying so
        await sessions.opened[0].until(lambda: "lost" in sessions.opened[0].events)
        assert sessions.opened[0].events == ["closing", "lost"]
        assert listener.counters.rejected == {}


async def test_a_reader_that_does_not_drain_makes_the_peer_wait_with_tls_too(tmp_path: Path) -> None:
    limits = NetLimits(output_bytes_max=128 * 1024, output_high_water_bytes=64 * 1024, output_low_water_bytes=16 * 1024)
    sessions = Sessions()
    async with listening(sessions, files(tmp_path), limits) as listener:
        reader, writer = await connect(listener, client())
        writer.transport.pause_reading()  # type: ignore[attr-defined]  # a transport of TLS can
        flood = asyncio.create_task(_flood(writer, 32 * 1024 * 1024))
        await until(lambda: listener.counters.reading_pauses > 0)
        # One receive may have been echoed beyond the limit; nothing after it.
        assert sessions.opened[0].link.unsent_bytes < 2 * 1024 * 1024
        writer.transport.resume_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(WAIT_SECONDS):
            await reader.readexactly(32 * 1024 * 1024)
        await flood
        writer.close()


async def _flood(writer: asyncio.StreamWriter, size_bytes: int) -> None:
    for _ in range(size_bytes // 65_536):
        writer.write(bytes(65_536))
        await writer.drain()


async def test_plain_text_on_a_tls_port_is_closed_with_a_reason(tmp_path: Path) -> None:
    sessions = Sessions()
    async with listening(sessions, files(tmp_path)) as listener:
        await expect_rejection(listener, None)
        assert listener.counters.rejected == {"plain text on a TLS listener": 1}
        assert sessions.opened == []


async def test_tls_on_a_plain_port_is_closed_with_a_reason_both_sides_can_read() -> None:
    sessions = Sessions()
    async with listening(sessions, None) as listener:
        with pytest.raises(ssl.SSLError, match="(?i)handshake.failure"):
            await connect(listener, client())
        assert listener.counters.rejected == {"TLS on a plain listener": 1}
        assert sessions.opened == []


async def test_plain_and_tls_peers_of_this_machine_may_share_a_port(tmp_path: Path) -> None:
    async with listening(Sessions(), files(tmp_path, optional=True)) as listener:
        for context in (client(), None):
            reader, writer = await connect(listener, context)
            assert await echoed(reader, writer) == b"hello"
            writer.close()
        assert (listener.counters.accepted, listener.counters.opened_with_tls) == (2, 1)


@pytest.mark.parametrize(("minimum", "welcome"), [(ssl.TLSVersion.TLSv1_3, False), (ssl.TLSVersion.TLSv1_2, True)])
async def test_tls_1_2_is_spoken_only_when_allowed(tmp_path: Path, minimum: ssl.TLSVersion, welcome: bool) -> None:
    old = client()
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    async with listening(Sessions(), files(tmp_path, minimum=minimum)) as listener:
        if welcome:
            reader, writer = await connect(listener, old)
            assert await echoed(reader, writer) == b"hello"
            writer.close()
        else:
            with pytest.raises(ssl.SSLError, match="(?i)protocol.version"):
                await connect(listener, old)
            await until(lambda: listener.counters.rejected == {"TLS handshake failed": 1})


async def test_a_handshake_that_stalls_is_closed_at_the_deadline(tmp_path: Path) -> None:
    async with listening(Sessions(), files(tmp_path), NetLimits(handshake_seconds=0.05)) as listener:
        reader, writer = await connect(listener)
        writer.write(bytes.fromhex("16 03 01 01 00 01"))
        async with asyncio.timeout(WAIT_SECONDS):
            assert await reader.read() == b""
        writer.close()
        assert listener.counters.rejected == {"no first message in time": 1}


async def test_garbage_after_the_first_byte_is_no_handshake(tmp_path: Path) -> None:
    async with listening(Sessions(), files(tmp_path)) as listener:
        reader, writer = await connect(listener)
        writer.write(b"\x16" + b"garbage" * 100)
        async with asyncio.timeout(WAIT_SECONDS):
            await reader.read()
        writer.close()
        assert listener.counters.rejected == {"TLS handshake failed": 1}


async def test_garbage_in_the_middle_closes_that_connection_alone(tmp_path: Path) -> None:
    sessions = Sessions()
    async with listening(sessions, files(tmp_path)) as listener:
        bystander = await connect(listener, client())
        assert await echoed(*bystander) == b"hello"
        _, writer = await connect(listener, client())
        writer.write(b"hello")
        await until(lambda: len(sessions.opened) == 2)
        raw = writer.get_extra_info("socket")
        os.write(raw.fileno(), b"\x17\x03\x03\x00\x10" + bytes(16))
        await until(lambda: listener.counters.rejected == {"TLS broken": 1})
        assert await echoed(*bystander) == b"hello"
        for each in (writer, bystander[1]):
            each.close()


# Mutual TLS.


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        (CA.issue_cert("wheel.example", "other.example", common_name="wheel"), "wheel.example"),
        (CA.issue_cert("10.0.0.1", common_name="the wheel"), "the wheel"),
    ],
    ids=["first dns", "common name"],
)
async def test_a_certificate_says_who_its_owner_is(tmp_path: Path, certificate: trustme.LeafCert, name: str) -> None:
    sessions = Sessions()
    async with listening(sessions, files(tmp_path, mutual=True)) as listener:
        reader, writer = await connect(listener, client(certificate))
        assert await echoed(reader, writer) == b"hello"
        assert sessions.opened[0].link.identity == name  # type: ignore[attr-defined]  # the link is a peer
        writer.close()


WRONG = {
    "none": (None, "peer did not return a certificate"),
    "another CA's": (OTHER_CA.issue_cert("wheel.example"), "certificate verify failed (unable to get local issuer certificate)"),
    "expired": (CA.issue_cert("wheel.example", not_before=PAST, not_after=PAST), "certificate verify failed (certificate has expired)"),
    "of a nobody": (CA.issue_cert("10.0.0.1"), "the certificate contains no client name"),
}


@pytest.mark.parametrize("certificate, reason", WRONG.values(), ids=list(WRONG))
async def test_a_peer_without_a_good_certificate_is_closed_with_a_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, certificate: trustme.LeafCert | None, reason: str
) -> None:
    sessions = Sessions()
    async with listening(sessions, files(tmp_path, mutual=True)) as listener:
        await expect_rejection(listener, client(certificate))
        await until(lambda: listener.counters.rejected == {"TLS handshake failed": 1})
    assert next(record.reason for record in caplog.records if hasattr(record, "reason")) == f"TLS handshake failed: {reason}"
    assert sessions.opened == []


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        ({"subjectAltName": (("DNS", "a"), ("URI", "spiffe://b"), ("URI", "c"))}, "spiffe://b"),
        ({"subjectAltName": (("email", "a@b"), ("DNS", "a"))}, "a"),
        ({"subject": ((("organizationName", "o"),), (("commonName", "c"),))}, "c"),
        ({"subjectAltName": (("DNS", "a\nb"),), "subject": ((("commonName", "c"),),)}, None),
        ({"subjectAltName": (("DNS", ""),)}, None),
        ({"subject": ((("organizationName", "o"),),)}, None),
        ({}, None),
    ],
)
def test_the_identity_is_one_whole_name_or_none(certificate: dict[str, object], name: str | None) -> None:
    assert identity_of(certificate) == name


# Certificates that change.


async def test_a_new_certificate_is_for_new_connections_and_drops_no_old_one(tmp_path: Path) -> None:
    settings = files(tmp_path)
    tls = Tls(settings)
    listener = await Listener.open("127.0.0.1", 0, [Sessions().protocol], tls=tls)
    old = await connect(listener, client())
    assert not tls.has_changed()
    files(tmp_path, OTHER_CA.issue_cert("localhost"))
    assert tls.has_changed()
    tls.reload()
    assert not tls.has_changed()
    new = await connect(listener, client(trusts=OTHER_CA))
    assert await echoed(*new) == b"hello"
    assert await echoed(*old) == b"hello"
    with pytest.raises(ssl.SSLCertVerificationError):
        await connect(listener, client())
    for _, writer in (old, new):
        writer.close()
    await listener.drain(0.0)


async def test_a_certificate_that_cannot_be_used_leaves_the_old_one_in_place(tmp_path: Path) -> None:
    settings = files(tmp_path)
    tls = Tls(settings)
    listener = await Listener.open("127.0.0.1", 0, [Sessions().protocol], tls=tls)
    settings.key.write_bytes(CA.issue_cert("localhost").private_key_pem.bytes())
    assert tls.has_changed()
    with pytest.raises(TlsUnusable, match="key values mismatch"):
        tls.reload()
    assert not tls.has_changed(), "the same wrong files are reported once"
    reader, writer = await connect(listener, client())
    assert await echoed(reader, writer) == b"hello"
    writer.close()
    await listener.drain(0.0)


def encrypted_key() -> bytes:
    secret = serialization.BestAvailableEncryption(b"passphrase")
    return ec.generate_private_key(ec.SECP256R1()).private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("server.pem", None, "server.pem: No such file or directory"),
        ("server.key", None, "server.key: No such file or directory"),
        ("clients.pem", None, "clients.pem: No such file or directory"),
        ("server.pem", b"garbage", "server.pem and"),
        ("server.key", encrypted_key(), "server.key: "),
        ("clients.pem", b"garbage", "clients.pem: no certificate or crl found"),
    ],
)
def test_unusable_files_are_named_in_one_line(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    settings = files(tmp_path, mutual=True)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TlsUnusable) as caught:
        Tls(settings)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_others_can_read_is_rejected(tmp_path: Path) -> None:
    settings = files(tmp_path)
    settings.key.chmod(0o644)
    with pytest.raises(TlsUnusable, match=r"can be read by others \(mode 644\); chmod 600 it"):
        Tls(settings)
