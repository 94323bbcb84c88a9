"""Idle connections and calls leave room for other peers and for administrators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from pyarrow import flight

import headrace.flight.calls
from headrace.access.access import AccessSettings, Mode
from headrace.access.administration import Caller
from headrace.broker.authorizer import Principal
from headrace.errors import LoginFailed, LoginThrottled, Unavailable
from headrace.flight.calls import Calls
from headrace.flight.connections import ConnectionLimits, ConnectionWatch, connections, surplus
from headrace.flight.endpoint import EndpointSettings
from headrace.flight.login import PendingLogins
from headrace.flight.sockets import Address, open_files
from headrace.limits import (
    FLIGHT_CALLS_MAX,
    FLIGHT_CALLS_RESERVED,
    FLIGHT_LOGIN_PENDING_SECONDS_MAX,
    FLIGHT_OPENING_CALLS_MAX,
    FLIGHT_OPENING_SECONDS_MAX,
)
from tests.flight.harness import Harness, running_harness, values
from tests.flight.http2 import SilentPeer
from tests.flight.test_bounds import eventually

ENFORCED = AccessSettings(Mode.ENFORCED)
ROOT = Caller(Principal("admin", "internal"))


@pytest.fixture
def guarded() -> Iterator[Harness]:
    with running_harness(access=ENFORCED) as harness:
        yield harness


def test_silent_puts_are_bounded_by_themselves_and_an_administrator_still_logs_in(guarded: Harness) -> None:
    calls = guarded.endpoint._server.calls
    with ExitStack() as opened:
        before = threading.active_count()
        peers = [SilentPeer(guarded.endpoint.address) for _ in range(10)]
        for peer in peers:
            opened.callback(peer.close)
            for _ in range(40):
                peer.call("DoPut")
        eventually(lambda: calls.under_way == FLIGHT_OPENING_CALLS_MAX, "the silent calls are not counted")
        assert calls._opening() == FLIGHT_OPENING_CALLS_MAX, "400 have come"
        assert threading.active_count() <= before + FLIGHT_OPENING_CALLS_MAX + 8
        assert guarded.password is not None
        with guarded.client(user="admin", password=guarded.password) as admin:
            admin.create_topic("t")
            assert admin.append("t", [values(b"x")]).records == 1
    eventually(lambda: calls.under_way == 0, "the calls of peers that have gone are still counted")


def test_when_every_call_is_taken_an_administrator_still_logs_in_and_a_user_does_not(guarded: Harness) -> None:
    guarded.run(guarded.access.administration.create_user(ROOT, "ann", "a long password", ["consumer"]))
    calls = guarded.endpoint._server.calls
    held = [calls.begin() for _ in range(FLIGHT_CALLS_MAX)]
    try:
        with guarded.client(user="ann", password="a long password", timeout_seconds=2.0) as user, pytest.raises(Unavailable):
            user.topics()
        assert guarded.password is not None
        with guarded.client(user="admin", password=guarded.password) as admin:
            admin.create_topic("t")
            assert admin.append("t", [values(b"x")]).records == 1
    finally:
        for call in held:
            calls.end(call)


def test_a_peer_that_sends_no_first_message_loses_its_connection(guarded: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headrace.flight.calls, "FLIGHT_OPENING_SECONDS_MAX", 0.1)
    peer = SilentPeer(guarded.endpoint.address)
    try:
        peer.call("DoPut")
        eventually(lambda: not peer.is_open(), "it still has its connection")
        eventually(lambda: guarded.endpoint._server.calls.under_way == 0, "its call still has its thread")
    finally:
        peer.close()


def test_a_silent_call_beside_one_that_is_served_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now, cut = [0.0], list[str]()
    calls = Calls(10, cut=cut.append, clock=lambda: now[0])
    calls.opened(calls.arrive(), "ipv4:10.0.0.1:1")
    now[0] = 1.0
    calls.opened(calls.arrive(), "ipv4:10.0.0.2:2")
    calls.arrive(is_opening=True)
    assert calls.late_openings == 0
    now[0] += FLIGHT_OPENING_SECONDS_MAX
    assert calls.late_openings == 1
    assert calls.peers == ["ipv4:10.0.0.1:1", "ipv4:10.0.0.2:2"]


def test_connections_beyond_the_limit_are_ended_and_calls_go_on() -> None:
    with (
        running_harness(settings=EndpointSettings(connections=ConnectionLimits(connections_max=20))) as harness,
        harness.client() as flight_client,
    ):
        harness.topic("t")
        harness.topic("quiet")
        waiting = threading.Thread(target=lambda: flight_client.wait({"quiet": {0: 0}}, 20_000))
        waiting.start()
        eventually(lambda: harness.endpoint._server.calls.under_way == 1, "no call waits")
        idle = [SilentPeer(harness.endpoint.address) for _ in range(100)]
        eventually(lambda: sum(peer.is_open() for peer in idle) < 20, "they keep their connections")
        assert len(connections(int(harness.endpoint.address.rpartition(":")[2]))) <= 20
        with harness.client() as other:
            other.append("t", [values(b"x")])
            other.append("quiet", [values(b"x")])
        waiting.join(60)
        assert not waiting.is_alive()
        for peer in idle:
            peer.close()


def test_connections_are_counted_only_where_a_limit_can_be_exceeded_or_a_call_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []

    def count(port: int) -> list[Address]:
        counted.append(port)
        return []

    monkeypatch.setattr("headrace.flight.connections.connections", count)
    now = [0.0]
    calls = Calls(10, clock=lambda: now[0])

    def count_with(limits: ConnectionLimits) -> list[int]:
        counted.clear()
        ConnectionWatch(1, calls, limits).check()
        return counted

    files = open_files()
    assert count_with(ConnectionLimits(files + 100, files + 100)) == []
    assert count_with(ConnectionLimits(1, files + 100)) == [1]
    assert count_with(ConnectionLimits(files + 100, 1)) == [1]
    calls.arrive(is_opening=True)
    now[0] += FLIGHT_OPENING_SECONDS_MAX
    assert count_with(ConnectionLimits(files + 100, files + 100)) == [1]


def test_the_address_with_the_most_connections_loses_them_and_those_without_a_call_first() -> None:
    many = [("10.0.0.1", port) for port in range(10)]
    few = [("10.0.0.2", port) for port in range(2)]
    served = {("10.0.0.1", 9)}
    gone = surplus([*many, *few], served, ConnectionLimits(connections_max=4, per_ip_max=100))
    assert len(gone) == 8 and set(gone) <= set(many) - served
    assert surplus([*many, *few], served, ConnectionLimits(connections_max=12, per_ip_max=100)) == []
    assert set(surplus(many, served, ConnectionLimits(connections_max=100, per_ip_max=1))) == set(many) - served


def test_the_reserve_is_for_administrators_up_to_its_end() -> None:
    calls = Calls(2)
    for _ in range(2):
        calls.arrive()
    with pytest.raises(Unavailable, match="2 calls"):
        calls.arrive()
    for _ in range(FLIGHT_CALLS_RESERVED):
        calls.arrive(is_admin=True)
    with pytest.raises(Unavailable):
        calls.arrive(is_admin=True)


def test_a_wrong_password_fails_with_the_first_call_and_counts_for_the_address_it_came_from(guarded: Harness) -> None:
    seen: set[str] = set()
    begin = guarded.access._throttle.begin

    def counted(account: str | None, address: str, now: int) -> None:
        seen.add(address)
        begin(account, address, now)

    guarded.access._throttle.begin = counted  # type: ignore[method-assign]
    with flight.FlightClient(f"grpc://{guarded.endpoint.address}") as plain:
        token = plain.authenticate_basic_token("admin", "wrong password")
        options = flight.FlightCallOptions(headers=[token])
        for _ in range(2):
            with pytest.raises(flight.FlightUnauthenticatedError):
                list(plain.list_actions(options))
    assert seen == {"127.0.0.1"}


def test_spraying_names_over_flight_is_slowed_down_by_address_and_locks_out_no_other_address(guarded: Harness) -> None:
    failures = []
    for number in range(60):
        with (
            guarded.client(user=f"user {number}", password="wrong password") as flight_client,
            pytest.raises((LoginFailed, LoginThrottled)) as caught,
        ):
            flight_client.topics()
        failures.append(caught.type)
    assert LoginThrottled in failures
    assert guarded.password is not None
    elsewhere = Caller(Principal("anonymous", "flymq"), "10.0.0.9")
    assert guarded.run(guarded.access.log_in("admin", guarded.password, elsewhere)).name == "admin"


def test_a_login_that_never_calls_is_forgotten() -> None:
    now = [0.0]
    pending = PendingLogins(lambda: now[0], count_max=2)
    first, second = pending.give("ann", "a"), pending.give("ben", "b")
    assert pending.find(first) is not None
    third = pending.give("cid", "c")
    assert (pending.find(first), pending.find(second) is not None, pending.find(third) is not None) == (None, True, True)
    now[0] = FLIGHT_LOGIN_PENDING_SECONDS_MAX
    assert pending.find(second) is None
    pending.give("dan", "d")
    assert len(pending._by_token) == 1
