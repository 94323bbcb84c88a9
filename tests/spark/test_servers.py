"""Addresses and logins from options, including those of Kafka jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.flight.client import Servers
from headrace.spark.options import Options
from headrace.spark.servers import servers_of

JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="ann" password="sword fish";'


def servers(**more: str) -> Servers:
    return servers_of(Options({"servers": "a:1", **more}), {"SECRET": "swordfish"})


def test_addresses_are_separated_by_commas_and_have_a_default_port() -> None:
    assert servers(servers="a:1, b").addresses == ("a:1", "b:8815")


def test_a_missing_address_is_named_with_an_example() -> None:
    with pytest.raises(ConfigError, match='kafka.bootstrap.servers is missing: .*"127.0.0.1:8815"'):
        servers_of(Options({}), {})


def test_an_address_that_is_none_is_named() -> None:
    with pytest.raises(ConfigError, match="option kafka.bootstrap.servers: .*a:b"):
        servers(servers="a:b")


def test_the_password_is_given_or_is_in_a_file_or_a_variable(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("swordfish\n")
    for given in ({"password": "swordfish"}, {"password": f"file:{secret}"}, {"password": "env:SECRET"}, {"password.file": str(secret)}):
        found = servers(user="ann", **given)
        assert (found.user, found.password) == ("ann", "swordfish")
        assert "swordfish" not in repr(found)


def test_a_password_that_is_not_there_is_named_by_its_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the variable NOPE is not set"):
        servers(user="ann", password="env:NOPE")
    with pytest.raises(ConfigError, match="password.file: .*nope: No such file"):
        servers(user="ann", password=f"file:{tmp_path}/nope")


def test_a_user_needs_a_password_and_a_password_alone_is_an_api_key() -> None:
    with pytest.raises(ConfigError, match="option password is missing: a login needs user and password"):
        servers(user="ann")
    assert (servers(password="key").user, servers(password="key").password) == ("", "key")


def test_two_places_for_one_password_are_rejected() -> None:
    with pytest.raises(ConfigError, match="password and password.file are both set"):
        servers(**{"user": "ann", "password": "swordfish", "password.file": "x"})


def test_the_login_of_a_kafka_job_is_understood() -> None:
    found = servers(**{"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "PLAIN", "kafka.sasl.jaas.config": JAAS})
    assert (found.user, found.password, found.tls) == ("ann", "sword fish", True)
    found = servers(**{"kafka.sasl.jaas.config": "x required username='ann' password=pw;", "kafka.sasl.mechanism": "SCRAM-SHA-512"})
    assert (found.user, found.password, found.tls) == ("ann", "pw", False)


def test_a_login_that_cannot_be_honoured_is_rejected() -> None:
    with pytest.raises(ConfigError, match="kafka.sasl.mechanism: expected PLAIN or SCRAM-… .user and password., got GSSAPI"):
        servers(**{"kafka.sasl.mechanism": "GSSAPI"})
    with pytest.raises(ConfigError, match='jaas.config needs username="…" and password="…"') as message:
        servers(**{"kafka.sasl.jaas.config": 'password="swordfish"'})
    assert "swordfish" not in str(message.value)
    with pytest.raises(ConfigError, match="kafka.security.protocol: expected PLAINTEXT, SSL, .* got QUIC"):
        servers(**{"kafka.security.protocol": "QUIC"})


def test_encryption_by_any_of_its_names(tmp_path: Path) -> None:
    pem = tmp_path / "a.pem"
    pem.touch()
    assert not servers().tls
    assert servers(tls="true").tls
    assert servers(servers="grpc+tls://a:1").tls
    assert servers(**{"kafka.security.protocol": "ssl"}).tls
    named = servers(**{"tls.ca": str(pem), "tls.serverName": "broker"})
    assert (named.tls, named.ca_file, named.server_name) == (True, str(pem), "broker")
    assert servers(**{"kafka.ssl.truststore.location": str(pem), "kafka.ssl.truststore.type": "PEM"}).ca_file == str(pem)


def test_a_certificate_to_show_comes_with_its_key(tmp_path: Path) -> None:
    pem = tmp_path / "a.pem"
    pem.touch()
    shown = servers(**{"tls.certificate": str(pem), "tls.key": str(pem)})
    assert (shown.tls, shown.certificate_file, shown.key_file) == (True, str(pem), str(pem))
    assert servers(**{"kafka.ssl.keystore.location": str(pem)}) == shown
    with pytest.raises(ConfigError, match="option tls.key is missing"):
        servers(**{"tls.certificate": str(pem)})


@pytest.mark.parametrize("store, name", [("truststore", "tls.ca"), ("keystore", "tls.certificate")])
@pytest.mark.parametrize("given", [{"location": "ca.jks"}, {"type": "JKS"}])
def test_a_store_of_java_is_rejected(store: str, name: str, given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"only PEM files are supported; set one in {name}"):
        servers(**{f"kafka.ssl.{store}.{key}": value for key, value in given.items()})


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="option tls.ca: there is no file nowhere.pem"):
        servers(**{"tls.ca": "nowhere.pem"})


def test_a_request_has_a_time_out() -> None:
    assert servers().timeout_seconds == 30
    assert servers(**{"kafka.request.timeout.ms": "500"}).timeout_seconds == 0.5
