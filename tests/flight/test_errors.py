"""An error arrives with the same class, text and fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Never

import pyarrow as pa
import pytest
from pyarrow import flight

from headrace import errors
from headrace.errors import BrokerError, Unavailable, UnknownTopic
from headrace.flight.client import FlightClient, Servers
from headrace.flight.errors import broker_error, flight_error
from tests.flight.harness import Harness, values

SAMPLES: list[BrokerError] = [
    errors.InvalidRequest("no"),
    errors.LimitExceeded("too many"),
    errors.RecordTooLarge(size_bytes=2, bytes_max=1),
    errors.UnknownTopic("töpic"),
    errors.UnknownPartition("t", 3),
    errors.TopicExists("t"),
    errors.OffsetOutOfRange(wanted=5, first=1, end=3),
    errors.NotAuthorized(principal="p", action="read", resource="topic 't'"),
    errors.LoginFailed(),
    errors.LoginThrottled(wait_ms=3_000),
    errors.Unavailable("later"),
    errors.DiskFull("full"),
    errors.StorageFailed("failed"),
    errors.InvalidRecord(index=3, faults=("a", "b"), schema="s-v1"),
    BrokerError("internal"),
]


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_the_way(error: BrokerError) -> None:
    carried = broker_error(flight_error(error))
    assert carried is not None
    assert type(carried) is type(error)
    assert (str(carried), carried.retriable) == (str(error), error.retriable)
    numbers = {name: value for name, value in vars(error).items() if isinstance(value, str | int)}
    assert {name: value for name, value in vars(carried).items() if name in numbers} == numbers


def test_a_plain_client_sees_the_kind_of_error_it_knows() -> None:
    assert isinstance(flight_error(errors.NotAuthorized(principal="p", action="a", resource="r")), flight.FlightUnauthorizedError)
    assert isinstance(flight_error(errors.LoginFailed()), flight.FlightUnauthenticatedError)
    assert isinstance(flight_error(errors.Unavailable("x")), flight.FlightUnavailableError)
    assert isinstance(flight_error(errors.UnknownTopic("x")), flight.FlightServerError)


def test_every_code_is_of_one_class_only() -> None:
    def below(kind: type[BrokerError]) -> list[type[BrokerError]]:
        return [one for direct in kind.__subclasses__() for one in (direct, *below(direct))]

    ours = [kind for kind in below(BrokerError) if kind.__module__ == "headrace.errors"]
    codes = [kind.code for kind in ours]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("extra", [b"", b"{", b"[]", b"{}", b'{"code": 1}', b'{"code": "x", "text": "t", "fields": 3}', b"\xff"])
def test_what_did_not_come_from_the_broker_is_not_taken_for_it(extra: bytes) -> None:
    assert broker_error(flight.FlightServerError("x", extra)) is None


def test_a_code_of_a_newer_broker_is_still_a_broker_error() -> None:
    error = broker_error(flight.FlightServerError("x", b'{"code": "new_thing", "text": "new thing", "fields": {"a": 1}}'))
    assert type(error) is BrokerError and str(error) == "new thing"


@pytest.mark.parametrize("letter", ["x", "é", "😀", "\n"])
def test_an_error_about_a_long_name_still_arrives(harness: Harness, letter: str) -> None:
    """gRPC replaces an error that does not fit into the trailers of a call."""
    name = letter * 1_024
    with harness.client() as flight_client:
        for call in (
            lambda: flight_client.describe([name]),
            lambda: list(flight_client.read(name, 0, 0, 1)),
            lambda: flight_client.append(name, [values(b"x")]),
        ):
            with pytest.raises(UnknownTopic) as caught:
                call()
            assert len(str(caught.value).encode()) < 1_100
            assert caught.value.topic.startswith(letter * 100)


class _WithoutThreads:
    """Raises as Arrow does when gRPC cannot start a thread."""

    def __init__(self, *, idle: tuple[str, ...] = ()) -> None:
        self._idle = idle

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object) -> Never:
            raise pa.ArrowInvalid("Resource temporarily unavailable")

        return (lambda *arguments: None) if name in self._idle else call


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.topics(),
        lambda client: list(client.read("t", 0, 0, 1)),
        lambda client: client.append("t", [pa.record_batch({"value": pa.array([b"x"], pa.binary())})]),
    ],
)
def test_a_process_without_free_threads_gets_an_error_of_headrace(
    call: Callable[[FlightClient], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = FlightClient(Servers.parse("localhost:1"))
    for broken in (_WithoutThreads(), _WithoutThreads(idle=("list_actions",))):
        monkeypatch.setattr(client, "_connected", lambda broken=broken: broken)
        with pytest.raises(Unavailable, match="cannot be made: Resource temporarily unavailable; check the limit of threads"):
            call(client)
