"""`headrace copy` from a data directory to Kafka and back: records, groups, schemas, users; again after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import headrace as api
from headrace.kafka_server import Cluster
from tests.cli.shell import headrace
from tests.cli.test_copy import everything, fill, flight, rows
from tests.spark.serving import FlightBroker


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """A part of the cluster of its own, for the brokers that the command starts too."""
    monkeypatch.setenv("HEADRACE__KAFKA__PREFIX", "copy-")
    return "copy-"


def copied(source: str | Path, target: str | Path, *arguments: str) -> dict[str, tuple[int, int, bool]]:
    """Return records, copied and verified of each topic."""
    done = headrace("copy", "--from", str(source), "--to", str(target), "-o", "json", *arguments)
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return {row["topic"]: (row["records"], row["copied"], row["verified"]) for row in found}


def settle(broker: FlightBroker, tmp_path: Path) -> None:
    """Give a broker a group, a schema, a user and a rule."""
    definition, password = tmp_path / "schema", tmp_path / "password"
    definition.write_text('{"type": "object"}')
    password.write_text("a long enough word")
    password.chmod(0o600)
    with api.sync.connect(f"flymq://{broker.tcp}") as client:
        client.commit("moved", 39, group="readers", partition=1)
    broker.command("topic", "create", "checked")
    broker.command("schema", "register", "shape", str(definition), "--type", "json")
    broker.command("schema", "require", "checked", "shape")
    broker.command("user", "create", "ann", "--role", "consumer", "--new-password-file", str(password))
    broker.command("acl", "create", "read", "topic:moved", "--for-user", "ann")


def check(broker: FlightBroker) -> None:
    """Expect what `settle` has made."""
    with api.sync.connect(f"flymq://{broker.tcp}") as client:
        committed = client.committed("moved", group="readers", partition=1)
        assert committed is not None
        [message, *_] = client.fetch("moved", committed, partition=1)
        assert message.value == b"value 40"
    broker.command("schema", "describe", "shape")
    broker.command("user", "describe", "ann")
    assert "moved" in broker.command("acl", "list", "-o", "json")
    assert headrace("pub", "checked", "no object", "--server", broker.tcp).code == 7, "the schema is required"


def test_everything_moves_to_kafka_and_back_and_an_interrupted_copy_continues(kafka: Cluster, prefix: str, tmp_path: Path) -> None:
    on_kafka = f"kafka://{kafka.bootstrap}"
    with FlightBroker(tmp_path / "source") as source:
        fill(source, "moved")
        settle(source, tmp_path)
        wanted = everything(source, "moved")
        assert source.stop()[0] == 0
    engine = ("--engine", "kafka", "--set", f"kafka.bootstrap={kafka.bootstrap}", "--set", f"kafka.prefix={prefix}")
    with FlightBroker(tmp_path / "kafka", *engine, code="") as target:
        # As an interrupted copy leaves it: one partition has some records, the other none.
        with flight(target) as client:
            client.create_topic("moved", 2)
            client.append("moved", [rows(0, 30)], partition=0)
        assert target.stop()[0] == 0
    assert copied(source.data, on_kafka) == {"checked": (0, 0, True), "moved": (200, 170, True)}
    assert copied(source.data, on_kafka)["moved"] == (200, 0, True)
    with FlightBroker(tmp_path / "again", *engine, code="") as target:
        assert everything(target, "moved") == wanted
        check(target)
        assert target.stop()[0] == 0
    back = tmp_path / "back"
    assert copied(on_kafka, back) == {"checked": (0, 0, True), "moved": (200, 200, True)}
    with FlightBroker(tmp_path / "last", data=back) as embedded:
        assert everything(embedded, "moved") == wanted
        check(embedded)
        assert embedded.stop()[0] == 0
