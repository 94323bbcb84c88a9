"""A broker with authentication and TLS, and secrecy of the password."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession

from headrace.flight.client import FlightClient, Servers
from headrace.server import certificates
from tests.spark.rows import Collected, load, publish, values_of
from tests.spark.serving import FlightBroker

PASSWORD = "swordfish-17"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    certificates.init(directory, ("localhost",), datetime.now(UTC))
    secret = directory / "password"
    secret.touch(0o600)
    secret.write_text(PASSWORD + "\n")
    return directory


@pytest.fixture(scope="module")
def guarded(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FlightBroker]:
    settings = [
        "access.mode=enforced",
        f"access.admin_password_file={keys / 'password'}",
        f"tls.certificate={keys / 'server.pem'}",
        f"tls.key={keys / 'server.key'}",
    ]
    with FlightBroker(tmp_path_factory.mktemp("guarded"), *(word for one in settings for word in ("--set", one))) as running:
        trust = {"tls": True, "ca_file": str(keys / "ca.pem"), "server_name": "localhost"}
        with FlightClient(Servers.parse(running.address, user="admin", password=PASSWORD, **trust)) as client:
            client.create_topic("secrets")
            publish(client, "secrets", range(3))
        yield running


@pytest.fixture
def login(keys: Path) -> dict[str, str]:
    return {"user": "admin", "password": PASSWORD, "tls.ca": str(keys / "ca.pem"), "tls.serverName": "localhost"}


def test_a_user_who_logs_in_reads(spark: SparkSession, guarded: FlightBroker, keys: Path, login: dict[str, str]) -> None:
    assert values_of(load(spark, guarded, subscribe="secrets", **login)) == ["0", "1", "2"]
    from_file = {**login, "password": f"file:{keys / 'password'}"}
    assert values_of(load(spark, guarded, subscribe="secrets", **from_file)) == ["0", "1", "2"]
    jaas = f'org.apache.kafka.common.security.plain.PlainLoginModule required username="admin" password="{PASSWORD}";'
    kafka = {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.jaas.config": jaas,
        "kafka.ssl.truststore.location": login["tls.ca"],
        "kafka.ssl.truststore.type": "PEM",
        "tls.serverName": "localhost",
    }
    assert values_of(load(spark, guarded, subscribe="secrets", **kafka)) == ["0", "1", "2"]


def test_a_user_who_does_not_gets_an_error(spark: SparkSession, guarded: FlightBroker, login: dict[str, str]) -> None:
    with pytest.raises(PySparkException, match="invalid username or password") as texts:
        load(spark, guarded, subscribe="secrets", **{**login, "password": "marlin-99"})
    assert "marlin" not in str(texts.value)
    anonymous = {name: value for name, value in login.items() if name not in ("user", "password")}
    with pytest.raises(PySparkException, match="LoginFailed|NotAuthorized|may not"):
        load(spark, guarded, subscribe="secrets", **anonymous)


def test_the_password_is_in_no_plan_no_error_no_log_and_no_checkpoint(
    spark: SparkSession, guarded: FlightBroker, login: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    frame = load(spark, guarded, subscribe="secrets", **login)
    for mode in ("extended", "formatted", "cost", "codegen"):
        frame.explain(mode)
    texts: list[str] = [str(frame.schema), repr(frame)]
    for options in ({"subscribe": "secretz"}, {"subscribe": "secrets", "startingOffsets": '{"secrets":{"0":77}}'}):
        with pytest.raises(PySparkException) as failure:
            load(spark, guarded, **login, **options).collect()
        texts.append(str(failure.value))
    Collected(spark, guarded, tmp_path / "good", subscribe="secrets", **login).run()
    with pytest.raises(StreamingQueryException) as failed:
        Collected(spark, guarded, tmp_path / "bad", subscribe="secrets", **{**login, "startingOffsets": '{"secrets":{"0":77}}'}).run()
    texts.append(str(failed.value))
    out, errors = capfd.readouterr()
    assert "BatchScan headrace" in out
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b'{"secrets": {"0": 3}}' in content for content in files)
    assert not [text for text in [out, errors, *texts] if PASSWORD in text]
    assert not [content for content in files if PASSWORD.encode() in content]
