"""Development certificates: accepted by strict verifiers, with private keys."""

from __future__ import annotations

import ssl
import stat
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from headrace.errors import ConfigError
from headrace.net.tls import TlsSettings, TlsStream, load
from headrace.server import certificates

NOW = datetime.now(UTC).replace(microsecond=0)


def test_the_files_are_named_and_keys_are_private(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "certs"
    made = [*certificates.init(directory, ["localhost"], NOW), *certificates.client(directory, "alice", NOW)]
    assert [path.name for path in made] == ["ca.pem", "ca.key", "server.pem", "server.key", "alice.pem", "alice.key"]
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.suffix == ".key"} == {0o600}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "mill.example"])
def test_a_strict_client_and_the_server_accept_each_other(tmp_path: Path, host: str) -> None:
    certificates.init(tmp_path, ["localhost", "127.0.0.1", "::1", "mill.example"], NOW)
    certificates.client(tmp_path, "alice.wheel", NOW)
    server = TlsStream(load(TlsSettings(tmp_path / "server.pem", tmp_path / "server.key", tmp_path / "ca.pem")))
    context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_cert_chain(tmp_path / "alice.wheel.pem", tmp_path / "alice.wheel.key")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    peer = context.wrap_bio(incoming, outgoing, server_hostname=host)
    for _ in range(4):
        try:
            peer.do_handshake()
        except ssl.SSLWantReadError:
            pass
        server.receive(outgoing.read())
        incoming.write(server.take())
    assert server.is_open
    assert server.identity == "alice.wheel"


def test_a_certificate_is_good_for_one_side_only_and_for_a_bounded_time(tmp_path: Path) -> None:
    certificates.init(tmp_path, ["localhost"], NOW)
    certificates.client(tmp_path, "alice", NOW)
    for name, purpose in (("server", ExtendedKeyUsageOID.SERVER_AUTH), ("alice", ExtendedKeyUsageOID.CLIENT_AUTH)):
        certificate = x509.load_pem_x509_certificate((tmp_path / f"{name}.pem").read_bytes())
        assert list(certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value) == [purpose]
        assert certificate.not_valid_before_utc < NOW
        assert (certificate.not_valid_after_utc - NOW).days == certificates.LEAF_DAYS


def test_nothing_that_exists_is_overwritten(tmp_path: Path) -> None:
    certificates.init(tmp_path, ["localhost"], NOW)
    certificates.client(tmp_path, "alice", NOW)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ConfigError, match=r"ca\.pem already exists"):
        certificates.init(tmp_path, ["localhost"], NOW)
    with pytest.raises(ConfigError, match=r"alice\.pem already exists"):
        certificates.client(tmp_path, "alice", NOW)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("name", ["", "../alice", "a/b", "ca", "server", ".hidden", "a b", "x" * 64, "a\n"])
def test_a_name_that_is_no_file_name_is_no_client(tmp_path: Path, name: str) -> None:
    certificates.init(tmp_path, ["localhost"], NOW)
    with pytest.raises(ConfigError, match="is not a client name"):
        certificates.client(tmp_path, name, NOW)


@pytest.mark.parametrize("name", ["", "a b", "-a", "host:1", "a\n", "x" * 300])
def test_what_is_no_host_gets_no_certificate(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="neither a host name nor an address"):
        certificates.init(tmp_path / "certs", [name], NOW)
    assert not (tmp_path / "certs").exists()


def test_a_client_needs_a_ca(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; create a CA with headrace certs init"):
        certificates.client(tmp_path, "alice", NOW)
    certificates.init(tmp_path, ["localhost"], NOW)
    (tmp_path / "ca.key").write_text("garbage")
    with pytest.raises(ConfigError, match="the CA cannot be read"):
        certificates.client(tmp_path, "alice", NOW)
