"""Section `[kafka]`: rules between keys, TLS, SASL, secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.config import Config
from headrace.server.config_sources import resolve
from headrace.server.kafka import kafka_settings

KAFKA = {"storage.engine": "kafka", "kafka.bootstrap": "a:9092,b:9092"}


def configured(**more: str) -> Config:
    values = KAFKA | {f"kafka.{name}": value for name, value in more.items()}
    return resolve(flags={name: ("--set", value) for name, value in values.items()}).config


def test_the_engine_gets_what_the_section_says() -> None:
    settings = kafka_settings(configured(prefix="team-", replication="3", deadline="5s", refresh="2s").kafka, {})
    assert (settings.bootstrap, settings.prefix, settings.replication) == ("a:9092,b:9092", "team-", 3)
    assert (settings.deadline_ms, settings.refresh_ms) == (5_000, 2_000)
    assert settings.security == {"security_protocol": "PLAINTEXT"}


@pytest.mark.parametrize("mechanism", ["plain", "scram-sha-256", "scram-sha-512"])
def test_a_password_comes_from_a_variable_and_is_never_shown(mechanism: str) -> None:
    config = configured(sasl=mechanism, user="ann", password="env:SECRET", tls="true")
    settings = kafka_settings(config.kafka, {"SECRET": "hunter2-and-more"})
    assert settings.security["security_protocol"] == "SASL_SSL"
    assert settings.security["sasl_mechanism"] == mechanism.upper()
    assert settings.security["sasl_plain_password"] == "hunter2-and-more"
    assert "hunter2" not in repr(settings) and "hunter2" not in repr(config)


async def test_a_token_is_read_again_for_each_connection(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("one")
    file.chmod(0o600)
    security = kafka_settings(configured(sasl="oauthbearer", password=f"file:{file}").kafka, {}).security
    provider = security["sasl_oauth_token_provider"]
    assert await provider.token() == "one"  # type: ignore[attr-defined]  # the library has no types
    file.write_text("two")
    assert await provider.token() == "two"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"sasl": "plain", "user": "ann"}, "kafka.password"),
        ({"sasl": "plain", "password": "env:X"}, "kafka.user"),
        ({"tls_ca": "/ca.pem"}, "kafka.tls"),
        ({"tls": "true", "tls_key": "/key.pem"}, "kafka.tls_key"),
        ({"bootstrap": ""}, "kafka.bootstrap"),
        ({"bootstrap": "no-port"}, "kafka.bootstrap"),
        ({"password": "hunter2"}, "kafka.password"),
    ],
)
def test_a_contradiction_is_an_error_that_names_the_key(more: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        configured(**more)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("more", [{"tls": "true", "tls_ca": "/nowhere/ca.pem"}, {"sasl": "plain", "user": "a", "password": "env:MISSING"}])
def test_a_missing_file_or_variable_is_an_error_in_one_line(more: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="kafka") as caught:
        kafka_settings(configured(**more).kafka, {})
    assert "\n" not in str(caught.value)


def test_an_encryption_key_of_the_data_directory_is_refused_with_kafka() -> None:
    with pytest.raises(ConfigError, match="encrypt"):
        resolve(flags={name: ("--set", value) for name, value in (KAFKA | {"storage.key_env": "KEY"}).items()})
