"""The Flight endpoint through plain `pyarrow.flight`, and invalid requests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import flight

from headrace.flight import request
from headrace.flight.client import FlightClient
from headrace.flight.request import STORED, stored_schema
from headrace.limits import FLIGHT_REQUEST_BYTES_MAX, PARTITIONS_MAX
from headrace.records import RecordBatch
from tests.conftest import Proof
from tests.flight.harness import ROOT, Harness, rows, values


@pytest.fixture
def plain(harness: Harness) -> Iterator[flight.FlightClient]:
    with flight.FlightClient(f"grpc://{harness.endpoint.address}") as client:
        yield client


def read(client: flight.FlightClient, ticket: dict[str, Any] | bytes) -> pa.Table:
    raw = ticket if isinstance(ticket, bytes) else json.dumps(ticket).encode()
    return client.do_get(flight.Ticket(raw)).read_all()


def test_every_partition_is_a_flight(harness: Harness, plain: flight.FlightClient, wide: str) -> None:
    harness.publish(wide, RecordBatch([b"x"] * 3), 4)
    found = {tuple(part.decode() for part in info.descriptor.path): info for info in plain.list_flights(wide.encode())}
    assert set(found) == {(wide, str(partition)) for partition in range(5)}
    assert found[wide, "4"].total_records == 3
    assert found[wide, "4"].total_bytes > 3
    assert found[wide, "4"].schema == stored_schema(STORED)


def test_the_endpoints_of_a_topic_hold_all_its_rows_once(harness: Harness, plain: flight.FlightClient, wide: str) -> None:
    for partition in range(5):
        for _ in range(3):
            harness.publish(wide, RecordBatch([b"x"] * 100_000), partition)
    info = plain.get_flight_info(flight.FlightDescriptor.for_path(wide))
    assert info.total_records == 1_500_000
    assert len(info.endpoints) > 5
    places: list[tuple[int, int]] = []
    for endpoint in info.endpoints:
        ticket = json.loads(endpoint.ticket.ticket)
        places += [(ticket["partition"], ticket["start"]), (ticket["partition"], ticket["stop"])]
    rest = [place for place in places if places.count(place) == 1]
    assert rest == [(partition, offset) for partition in range(5) for offset in (0, 300_000)], "gaps or overlaps"
    first = plain.do_get(info.endpoints[1].ticket).read_all()
    assert first.num_rows == places[3][1] - places[2][1]


def test_a_command_names_a_range_and_columns(harness: Harness, plain: flight.FlightClient, topic: str) -> None:
    harness.publish(topic, RecordBatch([b"a", b"b", b"c"]))
    command = json.dumps({"topic": topic, "start": 1, "columns": ["offset", "value"]}).encode()
    info = plain.get_flight_info(flight.FlightDescriptor.for_command(command))
    assert (info.total_records, info.schema.names) == (2, ["offset", "value"])
    assert plain.do_get(info.endpoints[0].ticket).read_all().to_pydict() == {"offset": [1, 2], "value": [b"b", b"c"]}


def test_a_ticket_without_ends_reads_what_there_is(harness: Harness, plain: flight.FlightClient, topic: str) -> None:
    harness.publish(topic, RecordBatch([b"a", b"b"]))
    assert read(plain, {"topic": topic}).column("value").to_pylist() == [b"a", b"b"]
    assert read(plain, {"topic": topic}).schema == stored_schema(STORED)


def test_a_path_is_enough_to_append(flight_client: FlightClient, plain: flight.FlightClient, wide: str) -> None:
    for descriptor in (flight.FlightDescriptor.for_path(wide), flight.FlightDescriptor.for_path(wide, "3")):
        batch = values(b"x")
        writer, answers = plain.do_put(descriptor, batch.schema)
        with writer:
            writer.write_batch(batch)
            writer.done_writing()
            assert json.loads(answers.read().to_pybytes())["records"] == 1
    assert len(rows(flight_client, wide, 3)) >= 1


def test_every_action_is_listed_with_what_it_does(plain: flight.FlightClient) -> None:
    listed = {action.type: action.description for action in plain.list_actions()}
    assert set(listed) == set(request.ACTIONS)
    assert all(len(text) > 20 for text in listed.values())


def test_an_error_has_its_code_and_text_for_any_client(plain: flight.FlightClient, topic: str) -> None:
    with pytest.raises(flight.FlightServerError, match="unknown_topic: topic 'nowhere' not found") as caught:
        read(plain, {"topic": "nowhere"})
    assert json.loads(caught.value.extra_info) == {
        "code": "unknown_topic",
        "text": "topic 'nowhere' not found",
        "fields": {"topic": "nowhere"},
    }


@pytest.mark.parametrize(
    ("ticket", "words"),
    [
        (b"", "ticket"),
        (b"{", "ticket"),
        (b"\xff\xfe", "ticket"),
        (b"[]", "ticket"),
        (b"{}", "missing required field `topic`"),
        ({"topic": 1}, "topic"),
        ({"topic": ""}, "topic"),
        ({"topic": "t", "partiton": 1}, "unknown field `partiton`"),
        ({"topic": "t", "partition": -1}, "partition"),
        ({"topic": "t", "partition": 1 << 40}, "partition"),
        ({"topic": "t", "start": -1}, "start"),
        ({"topic": "t", "start": 1 << 63}, "start"),
        ({"topic": "t", "columns": []}, "no columns selected"),
        ({"topic": "t", "columns": ["valeu"]}, "unknown column 'valeu'"),
        ({"topic": "t", "columns": ["topic"]}, "unknown column 'topic'"),
        ({"topic": "t", "columns": ["value", "value"]}, "duplicate column"),
        ({"topic": "t", "columns": ["value"] * 100}, "columns"),
        ({"topic": "t", "rows_max": 0}, "rows_max"),
        ({"topic": "t", "rows_max": 1 << 40}, "rows_max"),
        (b"[" * 100_000, "ticket"),
        (b" " * (FLIGHT_REQUEST_BYTES_MAX + 1), "exceeds the limit"),
    ],
)
def test_a_wrong_ticket_is_rejected_with_what_is_wrong(plain: flight.FlightClient, ticket: dict[str, Any] | bytes, words: str) -> None:
    with pytest.raises(flight.FlightServerError, match="invalid_request") as caught:
        read(plain, ticket)
    assert words in str(caught.value)


def test_wrong_paths_actions_and_commands_are_rejected(plain: flight.FlightClient, topic: str) -> None:
    for path in (["a", "b", "c"], ["a", "x"], [], ["a", "-1"], ["a", "00"], ["a", "٣"], [""]):
        with pytest.raises(flight.FlightServerError, match="invalid_request"):
            plain.get_flight_info(flight.FlightDescriptor.for_path(*path))
    with pytest.raises(flight.FlightServerError, match="unknown action 'dance'"):
        list(plain.do_action(flight.Action("dance", b"")))
    with pytest.raises(flight.FlightServerError, match="unknown field"):
        list(plain.do_action(flight.Action("topics", b'{"all": true}')))
    for command in (
        b"",
        b"{}",
        b'{"operation":"dance"}',
        b'{"operation":"append"}',
        b'{"operation":"append","topic":"t","partition":true}',
    ):
        batch = values(b"x")
        writer, answers = plain.do_put(flight.FlightDescriptor.for_command(command), batch.schema)
        with pytest.raises(flight.FlightServerError, match="invalid_request"), writer:
            writer.write_batch(batch)
            writer.done_writing()
            answers.read()


def mutated(dice: random.Random, good: bytes) -> bytes:
    """Return the request with a random error."""
    raw = bytearray(good)
    for _ in range(dice.randint(1, 4)):
        kind = dice.randrange(4)
        at = dice.randrange(len(raw) + 1)
        if kind == 0:
            raw[at : at + dice.randint(0, 5)] = b""
        elif kind == 1:
            raw[at:at] = dice.randbytes(dice.randint(1, 5))
        elif kind == 2:
            raw[at:at] = dice.choice([b"{", b"[", b'"', b"9" * 30, b"null", b"-1", b"1e999", b"\\u0000", b"true"])
        elif raw:
            raw[at % len(raw)] = dice.randrange(256)
    return bytes(raw)


def test_thousands_of_garbled_requests_are_answered_and_change_nothing(
    harness: Harness, plain: flight.FlightClient, topic: str, proof: Proof
) -> None:
    harness.publish(topic, RecordBatch([b"a", b"b"]))
    dice = random.Random(20)
    ticket = json.dumps({"topic": topic, "partition": 0, "start": 0, "stop": 2, "columns": ["value", "offset"], "rows_max": 10}).encode()
    bodies: dict[str, Any] = {
        "describe": {"topics": [topic]},
        "split": {"topic": topic, "partition": 0, "start": 0, "stop": 2, "parts": 2},
        "committed": {"group": "g", "topic": topic},
        "offset_for_time": {"topic": topic, "times": {"0": 0}},
        "wait": {"ends": {topic: {"0": 0}}, "wait_ms": 0},
        "schema": {"topic": topic},
        "last_version": {"writer": "a"},
        "drop": {"handles": ["h"]},
    }
    answered = refused = 0
    defects: list[str] = []
    for _ in range(1_500):
        action = dice.choice(list(bodies))
        for ask in (
            lambda: read(plain, mutated(dice, ticket)),
            lambda action=action: list(plain.do_action(flight.Action(action, mutated(dice, json.dumps(bodies[action]).encode())))),
        ):
            try:
                ask()
                answered += 1
            except flight.FlightServerError as failure:
                refused += 1
                defects += [] if failure.extra_info else [str(failure)]
    assert defects == []
    assert refused > 1_000
    assert harness.call(lambda: harness.broker.bounds(ROOT, topic, 0)).end == 2
    assert read(plain, {"topic": topic}).num_rows == 2
    proof("garbled Flight requests", answered + refused)


def test_an_exchange_is_rejected_with_a_clear_error(plain: flight.FlightClient, topic: str) -> None:
    writer, reader = plain.do_exchange(flight.FlightDescriptor.for_path(topic))
    with pytest.raises(flight.FlightServerError, match="invalid_request: DoExchange is not supported") as caught:
        reader.read_chunk()
    assert "Traceback" not in str(caught.value)
    with pytest.raises(flight.FlightServerError):
        writer.close()


@pytest.mark.parametrize(
    ("count", "words"), [(PARTITIONS_MAX, "unknown_topic"), (PARTITIONS_MAX + 1, "invalid_request: body of .* length <= 10000")]
)
@pytest.mark.parametrize(("action", "field", "more"), [("wait", "ends", {"wait_ms": 1}), ("commit", "offsets", {"group": "g"})])
def test_no_request_names_more_topics_than_there_can_be(
    plain: flight.FlightClient, action: str, field: str, more: dict[str, Any], count: int, words: str
) -> None:
    """The loop looks up each of them."""
    body = json.dumps({field: {f"nothing-{number}": {"0": 0} for number in range(count)}, **more}).encode()
    with pytest.raises(flight.FlightServerError, match=words):
        list(plain.do_action(flight.Action(action, body)))
