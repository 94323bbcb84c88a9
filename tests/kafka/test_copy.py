"""`headrace copy` from a data directory to Kafka and back: records, groups, schemas, users; again after it was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace as api
from headrace.kafka_server import Cluster
from tests.cli.shell import headrace
from tests.cli.test_copy import everything, fill
from tests.spark.serving import FlightBroker
from tests.test_programs import wait_gone

WAIT_SECONDS = 300


def copied(source: str | Path, target: str | Path, *arguments: str) -> dict[str, tuple[int, int, bool]]:
    """Return records, copied and verified of each topic."""
    done = headrace("copy", "--from", str(source), "--to", str(target), "-o", "json", *arguments)
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return {row["topic"]: (row["records"], row["copied"], row["verified"]) for row in found}


def run(broker: FlightBroker, *arguments: str) -> bytes:
    """Run a command against a broker, in this process."""
    done = headrace(*arguments, "--server", broker.tcp)
    assert done.code == 0, done.err
    return done.out


def settle(broker: FlightBroker, tmp_path: Path) -> None:
    """Give a broker a group, a schema, a user and a rule."""
    definition, password = tmp_path / "schema", tmp_path / "password"
    definition.write_text('{"type": "object"}')
    password.write_text("a long enough word")
    password.chmod(0o600)
    with api.sync.connect(f"flymq://{broker.tcp}") as client:
        client.commit("moved", 39, group="readers", partition=1)
    run(broker, "topic", "create", "checked")
    run(broker, "schema", "register", "shape", str(definition), "--type", "json")
    run(broker, "schema", "require", "checked", "shape")
    run(broker, "user", "create", "ann", "--role", "consumer", "--new-password-file", str(password))
    run(broker, "acl", "create", "read", "topic:moved", "--for-user", "ann")


def check(broker: FlightBroker) -> None:
    """Expect what `settle` has made."""
    with api.sync.connect(f"flymq://{broker.tcp}") as client:
        committed = client.committed("moved", group="readers", partition=1)
        assert committed is not None
        [message, *_] = client.fetch("moved", committed, partition=1)
        assert message.value == b"value 40"
    run(broker, "schema", "describe", "shape")
    run(broker, "user", "describe", "ann")
    assert b"moved" in run(broker, "acl", "list", "-o", "json")
    assert headrace("pub", "checked", "no object", "--server", broker.tcp).code == 7, "the schema is required"


KILLED = """
import itertools, os, signal, sys
from headrace.arrow import copying
from headrace.cli import copying_places, main
from headrace.flight.client import FlightClient

copying.BATCH_ROWS_MAX, copying.PUT_BYTES_MAX = 32, 1
append, puts, started = FlightClient.append, itertools.count(1), copying_places.started

def half(batches):
    for batch in batches:
        yield batch.slice(0, 16)
        os.kill(os.getpid(), signal.SIGKILL)

def tell(*arguments, **options):
    process = started(*arguments, **options)
    print(process.pid, flush=True)
    return process

FlightClient.append = lambda self, topic, batches, **place: append(self, topic, half(batches) if next(puts) == 6 else batches, **place)
copying_places.started = tell
main()
"""
"""A copy that is killed in its sixth append of 32 records, which is the second of partition 1, when half of that is sent."""


def kill_copy(source: str | Path, target: str | Path) -> None:
    """Copy, be killed in the middle, and wait until the brokers that the copy had started have ended too."""
    command = [sys.executable, "-c", KILLED, "copy", "--from", str(source), "--to", str(target)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == -signal.SIGKILL
    processes = [int(line) for line in done.stdout.splitlines()]
    assert len(processes) == 2
    for process in processes:
        wait_gone(process)


def check_resumed(found: dict[str, tuple[int, int, bool]]) -> None:
    """Expect that the killed copy had 100 records of partition 0 and 32 to 48 of partition 1."""
    records, added, verified = found["moved"]
    assert (records, verified) == (200, True) and 52 <= added <= 68


def test_a_copy_to_kafka_and_one_back_that_are_killed_continue_and_everything_is_there_once(
    kafka: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE__KAFKA__PREFIX", "copy-")  # for the brokers that the command starts
    on_kafka = f"kafka://{kafka.bootstrap}"
    with FlightBroker(tmp_path / "source", "--engine", "embedded") as source:
        fill(source, "moved")
        settle(source, tmp_path)
        wanted = everything(source, "moved")
        assert source.stop()[0] == 0
    kill_copy(source.data, on_kafka)
    check_resumed(copied(source.data, on_kafka))
    back = tmp_path / "back"
    kill_copy(on_kafka, back)
    check_resumed(copied(on_kafka, back))
    with FlightBroker(tmp_path / "last", "--engine", "embedded", data=back) as embedded:
        assert everything(embedded, "moved") == wanted
        check(embedded)
        assert embedded.stop()[0] == 0
