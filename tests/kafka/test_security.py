"""A Kafka listener with TLS and SASL: every mechanism, a broker that serves, and what a failed login says."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import pytest

import headrace
from headrace.engine.contract import TopicConfig, Write
from headrace.engine.kafka.engine import KafkaEngine
from headrace.kafka_server import Cluster
from headrace.records import RecordBatch
from headrace.server import certificates
from headrace.server.config_sources import resolve
from headrace.server.kafka import kafka_settings
from tests.kafka import secured
from tests.server.process import BrokerProcess, start_error

SECONDS = 300


@pytest.fixture(scope="session")
def ca(kafka: Cluster) -> Path:
    """The CA of the listener. The user exists from now on."""
    secured.create_user(kafka)
    return kafka.nodes[0].folder.parent / "certificates" / "ca.pem"


def arguments(settings: dict[str, str]) -> list[str]:
    return ["--engine", "kafka", *chain.from_iterable(("--set", f"kafka.{name}={value}") for name, value in settings.items())]


@pytest.mark.parametrize("mechanism", secured.MECHANISMS)
async def test_every_mechanism_writes_and_reads_over_tls(kafka: Cluster, ca: Path, mechanism: str) -> None:
    values = {"storage.engine": "kafka", "kafka.prefix": f"{mechanism}-"}
    values |= {f"kafka.{name}": value for name, value in secured.settings(kafka, ca, mechanism).items()}
    config = resolve(flags={name: ("--set", value) for name, value in values.items()}).config
    password = secured.token() if mechanism == "oauthbearer" else secured.PASSWORD
    engine = KafkaEngine(kafka_settings(config.kafka, {"KAFKA_PASSWORD": password}), clock=lambda: 1)
    async with asyncio.timeout(SECONDS):
        await engine.open()
        try:
            await engine.create_topic("t", 1, TopicConfig())
            await engine.append([Write("t", 0, RecordBatch([b"one", b"two"]))])
            [batch] = await engine.read("t", 0, 0, bytes_max=1000)
            assert list(batch.values()) == [b"one", b"two"]
        finally:
            await engine.close()


async def test_a_broker_serves_from_a_secured_kafka(kafka: Cluster, ca: Path, tmp_path: Path) -> None:
    settings = {**secured.settings(kafka, ca), "prefix": "secured-"}
    with BrokerProcess(tmp_path, *arguments(settings), log=tmp_path / "log", KAFKA_PASSWORD=secured.PASSWORD) as broker:
        host, port = broker.addresses[0]
        async with asyncio.timeout(SECONDS), headrace.connect(f"flymq://{host}:{port}") as client:
            await client.create_topic("t")
            await client.publish("t", b"value")
            assert [message.value for message in await client.fetch("t")] == [b"value"]
            await client.commit("t", 1, group="g")
            assert await client.committed("t", group="g") == 1


@pytest.mark.parametrize("mechanism", ["plain", "scram-sha-256"])
def test_a_wrong_password_is_named_at_the_start(kafka: Cluster, ca: Path, tmp_path: Path, mechanism: str) -> None:
    line = start_error(tmp_path, *arguments(secured.settings(kafka, ca, mechanism)), KAFKA_PASSWORD="not the password")
    assert f"Kafka at {kafka.secured_bootstrap} refuses the login; check kafka.sasl, kafka.user and kafka.password" in line


def test_an_unknown_ca_is_named_at_the_start(kafka: Cluster, ca: Path, tmp_path: Path) -> None:
    certificates.init(tmp_path / "other", ["127.0.0.1"], datetime.now(UTC))
    settings = secured.settings(kafka, tmp_path / "other" / "ca.pem")
    line = start_error(tmp_path, *arguments(settings), KAFKA_PASSWORD=secured.PASSWORD)
    assert f"Kafka at {kafka.secured_bootstrap} has a certificate that is not trusted; check kafka.tls_ca" in line


def test_a_missing_client_certificate_is_named_at_the_start(kafka: Cluster, ca: Path, tmp_path: Path) -> None:
    settings = {name: value for name, value in secured.settings(kafka, ca).items() if name not in ("tls_certificate", "tls_key")}
    line = start_error(tmp_path, *arguments(settings), KAFKA_PASSWORD=secured.PASSWORD)
    assert f"Kafka at {kafka.secured_bootstrap} refuses the client certificate, or the lack of one; check kafka.tls_certificate" in line
