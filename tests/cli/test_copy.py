"""`headrace copy`: between two brokers, again after an interruption, and between data directories."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import headrace as api
from headrace.arrow import copying
from headrace.flight.client import FlightClient, PartitionState, Servers
from headrace.flight.request import HEADERS, TIMESTAMP
from tests.cli.shell import headrace
from tests.spark.serving import FlightBroker

NAMES = count()
TIME_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FlightBroker, FlightBroker]]:
    with FlightBroker(tmp_path_factory.mktemp("source")) as source, FlightBroker(tmp_path_factory.mktemp("target")) as target:
        yield source, target


@pytest.fixture
def topic() -> str:
    return f"copied-{next(NAMES)}"


def rows(start: int, stop: int) -> pa.RecordBatch:
    numbers = range(start, stop)
    return pa.RecordBatch.from_arrays(
        [
            pa.array([None if number % 3 == 0 else b"k%d" % number for number in numbers], pa.binary()),
            pa.array([None if number % 7 == 6 else b"value %d" % number for number in numbers], pa.binary()),
            pa.array([[("a", b"%d" % number), ("b", None)][: number % 3] for number in numbers], HEADERS),
            pa.array([(TIME_MS + number) * 1000 for number in numbers], pa.int64()).cast(TIMESTAMP),
        ],
        names=["key", "value", "headers", "timestamp"],
    )


def flight(broker: FlightBroker) -> FlightClient:
    return FlightClient(Servers.parse(broker.address))


def fill(broker: FlightBroker, topic: str, partitions: int = 2, records: int = 100) -> None:
    with flight(broker) as client:
        client.create_topic(topic, partitions)
        for partition in range(partitions):
            client.append(topic, [rows(partition, partition + records)], partition=partition)


def everything(broker: FlightBroker, topic: str) -> list[dict[str, Any]]:
    with flight(broker) as client:
        bounds = client.describe([topic])[topic].partitions
        columns = ("key", "value", "headers", "timestamp", "partition", "offset")
        read = [batch for number, held in enumerate(bounds) for batch in client.read(topic, number, held.first, held.end, columns=columns)]
    return [row for batch in read for row in batch.to_pylist()]


def copied(brokers: tuple[FlightBroker, FlightBroker], *arguments: str, code: int = 0) -> list[dict[str, Any]]:
    source, target = brokers
    done = headrace("copy", "--from", f"flymq://{source.tcp}", "--to", f"flymq://{target.tcp}", "-o", "json", *arguments)
    assert done.code == code, done.err
    found: list[dict[str, Any]] = json.loads(done.out)
    return found


def test_records_keep_key_value_headers_time_partition_and_order(brokers: tuple[FlightBroker, FlightBroker], topic: str) -> None:
    source, target = brokers
    fill(source, topic)
    [row] = copied(brokers, "--topic", topic)
    assert (row["topic"], row["partitions"], row["records"], row["copied"], row["verified"]) == (topic, 2, 200, 200, True)
    assert everything(target, topic) == everything(source, topic)


def test_a_second_copy_adds_only_what_is_new(brokers: tuple[FlightBroker, FlightBroker], topic: str) -> None:
    source, target = brokers
    fill(source, topic)
    copied(brokers, "--topic", topic)
    with flight(source) as client:
        client.append(topic, [rows(500, 510)], partition=1)
    [row] = copied(brokers, "--topic", topic)
    assert (row["records"], row["copied"]) == (210, 10)
    assert copied(brokers, "--topic", topic)[0]["copied"] == 0
    assert everything(target, topic) == everything(source, topic)


def test_an_interrupted_copy_continues_where_it_stopped(
    brokers: tuple[FlightBroker, FlightBroker], topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = brokers
    fill(source, topic, partitions=1, records=1000)
    monkeypatch.setattr(copying, "BATCH_ROWS_MAX", 64)
    monkeypatch.setattr(copying, "PUT_BYTES_MAX", 1)
    with flight(source) as reader, flight(target) as writer:
        writer.create_topic(topic)
        seen: list[int] = []

        def interrupt(done: int) -> None:
            seen.append(done)
            if len(seen) == 4:
                raise KeyboardInterrupt

        place, other = (copying.Place(client, topic, 0, client.describe([topic])[topic].partitions[0]) for client in (reader, writer))
        with pytest.raises(KeyboardInterrupt):
            copying.copy(place, other, interrupt)
        present = writer.describe([topic])[topic].partitions[0].end
    assert 0 < present < 1000
    [row] = copied(brokers, "--topic", topic)
    assert (row["records"], row["copied"], row["verified"]) == (1000, 1000 - present, True)


def test_a_target_with_other_records_is_found_and_fails_the_command(brokers: tuple[FlightBroker, FlightBroker], topic: str) -> None:
    source, target = brokers
    fill(source, topic, partitions=1, records=10)
    with flight(target) as client:
        client.create_topic(topic)
        client.append(topic, [rows(50, 51)])
    [row] = copied(brokers, "--topic", topic, code=1)
    assert row["verified"] is False


def test_groups_continue_at_the_same_record(brokers: tuple[FlightBroker, FlightBroker], topic: str) -> None:
    source, target = brokers
    fill(source, topic)
    with api.sync.connect(f"flymq://{source.tcp}") as client:
        client.commit(topic, 40, group=f"group-{topic}", partition=1)
    copied(brokers, "--topic", topic)
    with api.sync.connect(f"flymq://{target.tcp}") as client:
        assert client.committed(topic, group=f"group-{topic}", partition=1) == 40
        assert client.committed(topic, group=f"group-{topic}", partition=0) is None


def test_schemas_requirements_roles_rules_and_users_are_copied_without_passwords(
    brokers: tuple[FlightBroker, FlightBroker], topic: str, tmp_path: Path
) -> None:
    source, target = brokers
    fill(source, topic, partitions=1, records=1)
    definition, password = tmp_path / "schema", tmp_path / "password"
    definition.write_text('{"type": "object"}')
    password.write_text("a long enough word")
    password.chmod(0o600)
    for arguments in (
        ["schema", "register", topic, str(definition), "--type", "json"],
        ["schema", "require", topic, topic],
        ["user", "create", f"user-{topic}", "--role", "consumer", "--new-password-file", str(password)],
        ["acl", "create", "read", f"topic:{topic}", "--for-user", f"user-{topic}"],
    ):
        done = headrace(*arguments, "--server", source.tcp)
        assert done.code == 0, done.err
    done = headrace("copy", "--from", f"flymq://{source.tcp}", "--to", f"flymq://{target.tcp}", "--topic", topic)
    assert done.code == 0 and f"user-{topic}" in done.err and "headrace user password" in done.err
    for arguments in (["schema", "describe", topic], ["user", "describe", f"user-{topic}"]):
        assert headrace(*arguments, "--server", target.tcp).code == 0
    rules = json.loads(headrace("acl", "list", "-o", "json", "--server", target.tcp).out)
    assert any(topic in json.dumps(rule) for rule in rules)
    assert headrace("pub", topic, "no object", "--server", target.tcp).code == 7, "the target requires the schema too"


def test_a_data_directory_is_copied_by_brokers_that_are_started_for_it(tmp_path: Path) -> None:
    with FlightBroker(tmp_path / "first") as broker:
        fill(broker, "moved", partitions=1, records=10)
        assert broker.stop()[0] == 0
        done = headrace("copy", "--from", str(broker.data), "--to", str(tmp_path / "second"), "-o", "json")
    assert done.code == 0, done.err
    assert [(row["topic"], row["copied"], row["verified"]) for row in json.loads(done.out)] == [("moved", 10, True)]
    assert headrace("check", str(tmp_path / "second")).code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--from", "/nowhere", "--to", "flymq://127.0.0.1:1"], 2, "'/nowhere' is not a directory"),
        (["--from", "figg://127.0.0.1:1", "--to", "flymq://127.0.0.1:1"], 2, "contradicts"),
        (["--from", "flymq://127.0.0.1:1", "--to", "flymq://127.0.0.1:1"], 5, "cannot connect"),
    ],
)
def test_a_place_that_cannot_be_opened_is_named(arguments: list[str], code: int, complaint: str) -> None:
    done = headrace("copy", *arguments)
    assert (done.code, complaint in done.err) == (code, True), done.err


def test_a_topic_with_another_number_of_partitions_is_refused(brokers: tuple[FlightBroker, FlightBroker], topic: str) -> None:
    source, target = brokers
    fill(source, topic, partitions=2, records=1)
    with flight(target) as client:
        client.create_topic(topic, 3)
    done = headrace("copy", "--from", f"flymq://{source.tcp}", "--to", f"flymq://{target.tcp}", "--topic", topic)
    assert done.code == 1 and "2 partitions at the source and 3 at the target" in done.err


class Holes:
    """A partition whose offsets have holes, as after compaction, or between Kafka's transactions."""

    def __init__(self, offsets: list[int], batch_rows: int) -> None:
        self._offsets, self._batch_rows = offsets, batch_rows

    def read(
        self, topic: str, partition: int, start: int, stop: int, *, columns: tuple[str, ...], rows_max: int
    ) -> Iterator[pa.RecordBatch]:
        for begin in range(0, len(self._offsets), self._batch_rows):
            some = self._offsets[begin : begin + self._batch_rows]
            batch = rows(begin, begin + len(some)).append_column("offset", pa.array(some, pa.int64()))
            yield batch.select(list(columns))


def place(offsets: list[int], batch_rows: int) -> copying.Place:
    return copying.Place(Holes(offsets, batch_rows), "t", 0, PartitionState(offsets[0], offsets[-1] + 1, 0))  # type: ignore[arg-type]  # reads only


@pytest.mark.parametrize("batch_rows", [1, 2, 100])
def test_offsets_are_translated_by_the_number_of_records_before_them(batch_rows: int) -> None:
    source, target = place([5, 7, 8, 20], batch_rows), place([0, 1, 3, 4], 3)
    found = copying.fingerprint(source, [5, 6, 8, 9, 21, 30])
    assert found.offsets == {5: 0, 6: 1, 8: 2, 9: 3, 21: 4, 30: 4}
    assert copying.offsets_of_rows(target, [0, 1, 2, 3, 4]) == {0: 0, 1: 1, 2: 3, 3: 4, 4: 5}


def test_a_fingerprint_does_not_depend_on_batches_or_offsets_and_sees_every_column() -> None:
    known = {copying.fingerprint(place(offsets, size)).sha256 for offsets in ([0, 1, 2, 3], [5, 7, 8, 20]) for size in (1, 2, 3, 100)}
    assert len(known) == 1
    batch = rows(0, 4)
    for column, other in (("key", b"other"), ("value", None), ("headers", [{"key": "a", "value": b""}]), ("timestamp", 1_000)):
        kind = batch.schema.field(column).type
        values = [*batch.column(column).to_pylist()[:3], other]
        changed = batch.set_column(batch.schema.get_field_index(column), column, pa.array(values, kind))
        assert list(copying._parts(changed)) != list(copying._parts(batch)), column
