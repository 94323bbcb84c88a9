"""`headrace.arrow.read`: positions in time, login and typed values."""

from __future__ import annotations

import datetime
import io
import json
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import trustme

import headrace.arrow
from headrace.access.access import AccessSettings, Mode
from headrace.access.administration import Caller
from headrace.arrow import UnreadableRecord
from headrace.broker.authorizer import Principal
from headrace.errors import InvalidRequest, LoginFailed, NotAuthorized, UnknownPartition
from headrace.flight.client import FlightClient, Servers
from headrace.flight.endpoint import EndpointSettings
from headrace.records import RecordBatch
from headrace.schemas.contract import SchemaType
from tests.flight.harness import NOW, ROOT, Harness, running_harness, values

ORDER = {"type": "object", "required": ["id"], "properties": {"id": {"type": "integer"}, "at": {"type": "string", "format": "date-time"}}}
AVRO = {"type": "record", "name": "R", "fields": [{"name": "id", "type": "long"}]}


def read(harness: Harness, topic: str, **more: Any) -> pa.Table:
    return headrace.arrow.read(topic, servers=harness.endpoint.address, **more).read_all()


def require(harness: Harness, topic: str, kind: SchemaType, definition: object) -> None:
    name = f"schema-of-{topic}"
    harness.run(harness.broker.schemas.register(ROOT, name, kind, json.dumps(definition).encode()))
    harness.run(harness.broker.schemas.require(ROOT, topic, name))


def avro(value: object) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(AVRO))), value)
    return out.getvalue()


# Positions


@pytest.fixture
def hourly(harness: Harness, wide: str) -> str:
    """A topic with a record every hour from 2023-11-14 22:13:20 UTC on, in partitions 0 and 1."""
    try:
        for hour in range(4):
            harness.now = NOW + hour * 3_600_000
            for partition in (0, 1):
                harness.publish(wide, RecordBatch([b"%d" % hour]), partition)
    finally:
        harness.now = NOW
    return wide


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        ("2023-11-15T00:00", [b"2", b"3"]),
        ("2023-11-15", [b"2", b"3"]),
        ("2023-11-15T00:00Z", [b"2", b"3"]),
        ("2023-11-15T01:00+02:00", [b"1", b"2", b"3"]),
        ("2023-11-15T00:13:20", [b"2", b"3"]),
        ("2023-11-15T00:13:20.000001", [b"3"]),
        (datetime.datetime(2023, 11, 15), [b"2", b"3"]),
        (datetime.datetime(2023, 11, 15, tzinfo=datetime.timezone(datetime.timedelta(hours=3))), [b"0", b"1", b"2", b"3"]),
        (datetime.date(2023, 11, 15), [b"2", b"3"]),
        ("1960-01-01", [b"0", b"1", b"2", b"3"]),
        ("2030-01-01", []),
    ],
)
def test_a_start_in_time_is_utc_and_means_the_first_record_at_or_after_it(
    harness: Harness, hourly: str, start: Any, expected: list[bytes]
) -> None:
    found = read(harness, hourly, start=start)
    for partition in (0, 1):
        assert found.filter(pc.equal(found["partition"], partition))["value"].to_pylist() == expected
    assert found.num_rows == 2 * len(expected)


def test_a_stop_in_time_ends_before_it(harness: Harness, hourly: str) -> None:
    found = read(harness, hourly, start="2023-11-14T23:13:20", stop="2023-11-15T01:13:20", partitions=[1])
    assert found["value"].to_pylist() == [b"1", b"2"]
    assert read(harness, hourly, stop="2030-01-01", partitions=[1]).num_rows == 4
    assert read(harness, hourly, start="2023-11-15", stop="2023-11-14").num_rows == 0


@pytest.mark.parametrize("start", ["yesterday", "17", "", 1.5, None, {0: "x"}])
def test_a_position_that_is_none_is_named_with_the_argument(harness: Harness, topic: str, start: Any) -> None:
    with pytest.raises(InvalidRequest, match="^stop: expected an offset, "):
        read(harness, topic, stop=start)


def test_a_partition_that_does_not_exist_is_an_error(harness: Harness, topic: str) -> None:
    with pytest.raises(UnknownPartition):
        read(harness, topic, partitions=[-1])


def test_a_partition_that_is_not_in_a_list_is_named_with_the_argument(harness: Harness, topic: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^partitions: expected a list such as \[0\], got 0"):
        read(harness, topic, partitions=0)


# Login


def test_a_password_or_an_api_key_logs_in() -> None:
    with running_harness(access=AccessSettings(Mode.ENFORCED)) as harness:
        servers, password = harness.endpoint.address, harness.password or ""
        key = harness.run(harness.access.administration.create_key(Caller(Principal("admin", "internal")), "admin", [])).text
        table = pa.table({"value": ["a"]})
        assert headrace.arrow.write("orders", table, servers=servers, user="admin", password=password).records == 1
        assert headrace.arrow.write("orders", table, servers=servers, api_key=key).records == 1
        assert headrace.arrow.read("orders", servers=servers, user="admin", password=password).read_all().num_rows == 2
        assert headrace.arrow.read("orders", servers=Servers.parse(servers), api_key=key).read_all().num_rows == 2
        with pytest.raises(NotAuthorized, match="anonymous may not"):
            headrace.arrow.read("orders", servers=servers)
        with pytest.raises(LoginFailed):
            headrace.arrow.read("orders", servers=servers, user="admin", password="wrong")


def test_tls_checks_the_server_with_the_given_authority(tmp_path: Path) -> None:
    authority = trustme.CA()
    leaf = authority.issue_cert("localhost", "127.0.0.1")
    ca_file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(ca_file)
    settings = EndpointSettings(certificate=leaf.cert_chain_pems[0].bytes(), key=leaf.private_key_pem.bytes())
    with running_harness(settings=settings) as harness:
        harness.topic("orders")
        assert read(harness, "orders", ca_file=str(ca_file)).num_rows == 0
        assert read(harness, "orders", tls=True, ca_file=str(ca_file)).num_rows == 0


@pytest.mark.parametrize(
    ("login", "because"),
    [
        ({"user": "ada"}, "password is missing"),
        ({"password": "x"}, "user is missing"),
        ({"user": "ada", "password": "x", "api_key": "y"}, "set only one"),
    ],
)
def test_half_a_login_is_an_error(login: dict[str, Any], because: str) -> None:
    for call in (headrace.arrow.read, lambda topic, **more: headrace.arrow.write(topic, pa.table({"value": ["a"]}), **more)):
        with pytest.raises(InvalidRequest, match=because):
            call("orders", servers="127.0.0.1:1", **login)


# Typed values


def test_values_have_the_types_of_the_schema_of_the_topic(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    require(harness, topic, SchemaType.JSON, ORDER)
    flight_client.append(topic, [values(b'{"id": 1, "at": "2026-01-02T03:04:05Z"}', b'{"id": 2}')])
    for format in ("json", "auto"):
        found = read(harness, topic, value_format=format, columns=["offset", "value"])
        assert found.schema.field("value").type == pa.struct([("id", pa.int64()), ("at", pa.timestamp("us", "UTC"))])
        assert found["value"].to_pylist()[1] == {"id": 2, "at": None}
    assert found.flatten().column_names == ["offset", "value.id", "value.at"]
    with pytest.raises(InvalidRequest, match="which is json, but value_format is avro"):
        read(harness, topic, value_format="avro")


def test_a_topic_without_a_schema_needs_one(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    flight_client.append(topic, [values(b'{"id": 1}')])
    with pytest.raises(InvalidRequest, match="no required schema .* set value_format and value_schema"):
        read(harness, topic, value_format="json")
    assert read(harness, topic, value_format="json", value_schema=json.dumps(ORDER))["value"].to_pylist() == [{"id": 1, "at": None}]
    assert read(harness, topic, value_format="string")["value"].to_pylist() == ['{"id": 1}']


def test_bad_records_fail_or_are_null_or_move_to_the_dead_letters(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    flight_client.append(topic, [values(b'{"id": 1}', b"no")])
    typed = {"value_format": "json", "value_schema": json.dumps(ORDER), "columns": ["value"]}
    with pytest.raises(UnreadableRecord, match=f"topic {topic}, partition 0, offset 1: .* bad_records"):
        read(harness, topic, **typed)
    nulled = read(harness, topic, bad_records="null", **typed)
    assert nulled.column_names == ["value", "_error"]
    assert nulled["value"][1].as_py() is None and "JSON" in nulled["_error"][1].as_py()
    assert read(harness, topic, bad_records="dlq", **typed).num_rows == 1
    assert flight_client.describe([f"{topic}.dlq"])[f"{topic}.dlq"].partitions[0].end == 1


def test_avro_in_confluents_framing_is_read_when_asked(harness: Harness, flight_client: FlightClient, topic: str) -> None:
    flight_client.append(topic, [values(b"\0\0\0\0\x11" + avro({"id": 7}), avro({"id": 8}), None, b"\0\0\0")])
    typed = {"value_format": "avro", "value_schema": json.dumps(AVRO), "columns": ["value"]}
    found = read(harness, topic, value_framing="confluent", bad_records="null", **typed)
    assert found["value"].to_pylist() == [{"id": 7}, None, None, None]
    assert found["_error"].to_pylist()[1::2] == [
        "no Confluent framing: expected a zero byte and a schema id of 4 bytes, got 10",
        "no Confluent framing: expected a zero byte and a schema id of 4 bytes, got 00 00 00",
    ]
    assert read(harness, topic, start=1, stop=2, **typed)["value"].to_pylist() == [{"id": 8}]


@pytest.mark.parametrize(
    ("more", "because"),
    [
        ({"value_format": "xml"}, "value_format: expected raw, json, avro, protobuf, string or auto, got 'xml'"),
        ({"value_schema": "{}"}, "value_schema has no effect with value_format 'raw'"),
        ({"value_format": "string", "value_version": 2}, "value_version has no effect with value_format 'string'"),
        (
            {"value_format": "protobuf", "value_schema": "x", "value_framing": "confluent"},
            "framing confluent is for values in avro and json",
        ),
        ({"value_format": "avro", "value_framing": "kafka"}, "unknown framing 'kafka'; expected none or confluent"),
        ({"value_format": "json", "value_schema": "{}", "value_version": 2}, "set only one"),
        ({"value_format": "auto", "value_schema": "{}"}, "name the format"),
        ({"value_format": "json", "bad_records": "skip"}, "bad_records: expected fail or dlq or null, got 'skip'"),
    ],
)
def test_arguments_that_contradict_are_named(harness: Harness, topic: str, more: dict[str, Any], because: str) -> None:
    with pytest.raises(InvalidRequest, match=because):
        read(harness, topic, **more)
