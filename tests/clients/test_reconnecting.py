"""Base client: reconnects, and reports unsent and unacknowledged records on closing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from headrace.clients.errors import ClientClosed, ConnectFailed, NotSent, OutcomeUnknown, RefusedRepeatedly
from headrace.clients.messages import ConnectionState
from headrace.clients.options import ClientOptions
from headrace.clients.publishing import Records
from headrace.clients.reconnecting import ReconnectingClient
from headrace.clients.window import Batch, Entry, Window
from headrace.errors import NotCoordinator


class Ledger(Window[Entry]):
    """Outstanding records that the test answers."""

    def __init__(self, unknown: int = 0, unsent: int = 0) -> None:
        super().__init__(records_max=100, bytes_max=100)
        self.left = (unknown, unsent)
        self.empty = asyncio.Event()

    @property
    def has_requests(self) -> bool:
        return not self.empty.is_set() and sum(self.left) > 0

    async def emptied(self) -> None:
        await self.empty.wait()

    def close(self, error: Exception | None = None) -> tuple[int, int]:
        return (0, 0) if self.empty.is_set() else self.left


class FakeClient(ReconnectingClient[ClientOptions]):
    protocol: ClassVar[str] = "Fake"

    def __init__(self, ledger: Ledger, failures: int = 0, **options: Any) -> None:
        self.states: list[ConnectionState] = []
        self.pauses: list[int] = []
        options |= {"backoff": self._pause, "on_state": lambda state, reason: self.states.append(state)}
        super().__init__("nowhere", 1, ClientOptions(**options), ledger)
        self.tried: list[str] = []
        self.failures = failures
        self.opened = asyncio.Event()
        self.released = 0
        self._is_connected = False

    async def _submit(self, records: Records) -> Sequence[Batch]:
        raise NotImplementedError

    def _pause(self, attempt: int) -> float:
        self.pauses.append(attempt)
        return 0.0

    @property
    def is_connected(self) -> bool:
        return self._is_connected

    async def _open(self) -> None:
        self.tried.append(self._host)
        if self.failures:
            self.failures -= 1
            raise ConnectFailed(host="nowhere", port=1, reason="not yet")
        self._is_connected = True
        self.opened.set()
        self._opened()

    def _disconnected(self) -> None:
        self._is_connected = False
        self.opened.clear()

    def _release(self) -> None:
        self.released += 1

    def lose(self) -> None:
        self._lost("cut")

    def _drop(self, reason: str) -> None:
        self._lost(reason)

    async def ask(self, coordinator: str, named: str = "") -> str:
        """Make a request that only this host serves."""

        async def request() -> str:
            await self.opened.wait()
            if self._host != coordinator:
                raise NotCoordinator(named)
            return self._host

        return await self._at_coordinator(request)

    def add_addresses(self, *hosts: str) -> None:
        self._others = tuple((host, 1) for host in hosts)

    def use(self) -> None:
        self._check_open()


async def test_a_client_reconnects_until_it_succeeds_with_delays_by_attempt() -> None:
    client = FakeClient(Ledger())
    await client._open()
    client.failures = 3
    client.lose()
    await client.opened.wait()
    assert client.pauses == [0, 1, 2, 3]
    assert client.states == [ConnectionState.CONNECTED, ConnectionState.DISCONNECTED, ConnectionState.CONNECTED]
    client.abandon()


async def test_a_client_moves_on_to_the_next_address_and_pauses_after_each_round() -> None:
    client = FakeClient(Ledger())
    client.add_addresses("second", "third")
    await client._open()
    client.failures = 4
    client.lose()
    await client.opened.wait()
    assert client.tried == ["nowhere", "second", "third", "nowhere", "second", "third"]
    assert client.pauses == [0, 0, 0, 1, 1]
    client.abandon()


async def test_a_client_of_several_addresses_gives_up_after_as_many_refusals_of_each() -> None:
    client = FakeClient(Ledger(unknown=1), refused_connections_max=2)
    client.add_addresses("second")
    for _ in range(3):
        await client._open()
        client.lose()
        client.use()
    await client._open()
    client.lose()
    with pytest.raises(RefusedRepeatedly, match="ended 4 connections in a row"):
        client.use()


async def test_a_request_that_needs_the_coordinator_moves_on_until_it_is_found() -> None:
    ledger = Ledger()
    ledger.empty.set()
    client = FakeClient(ledger)
    client.add_addresses("second", "third")
    await client._open()
    assert list(await asyncio.gather(client.ask("third"), client.ask("third"))) == ["third", "third"]
    assert client.tried == ["nowhere", "second", "third"], "two requests move the client once"
    assert await client.ask("second") == "second"
    assert client.tried == ["nowhere", "second", "third", "nowhere", "second"]
    client.abandon()


async def test_a_request_that_needs_the_coordinator_goes_to_the_address_that_the_broker_names() -> None:
    ledger = Ledger()
    ledger.empty.set()
    client = FakeClient(ledger)
    client.add_addresses("second", "third")
    await client._open()
    assert await client.ask("third", named="third:1") == "third"
    assert client.tried == ["nowhere", "third"]
    client.abandon()


async def test_a_request_that_needs_the_coordinator_fails_at_once_without_another_address() -> None:
    client = FakeClient(Ledger())
    await client._open()
    with pytest.raises(NotCoordinator, match="this operation needs the coordinator, which is at elsewhere:1"):
        await client.ask("elsewhere", named="elsewhere:1")
    assert client.tried == ["nowhere"]
    client.abandon()


async def test_pauses_go_on_growing_while_no_connection_is_useful() -> None:
    client = FakeClient(Ledger())
    for _ in range(3):
        client.lose()
        await client.opened.wait()
    assert client.pauses == [0, 1, 2]
    client.abandon()


@pytest.mark.parametrize(("unknown", "unsent", "error"), [(2, 0, OutcomeUnknown), (0, 3, NotSent), (2, 3, OutcomeUnknown)])
async def test_a_close_that_cannot_wait_any_longer_says_what_became_of_the_records(
    unknown: int, unsent: int, error: type[OutcomeUnknown] | type[NotSent]
) -> None:
    client = FakeClient(Ledger(unknown, unsent))
    with pytest.raises(error) as raised:
        await client.close(timeout=0.001)
    assert str(raised.value).startswith(f"{unknown or unsent} ")


async def test_a_close_waits_for_what_is_outstanding_and_a_second_one_does_nothing() -> None:
    ledger = Ledger(unknown=1)
    client = FakeClient(ledger)
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    assert not closing.done()
    ledger.empty.set()
    await closing
    await client.close()
    assert client.released == 1
    assert client.states == [ConnectionState.CLOSED]


async def test_a_closed_client_neither_reconnects_nor_accepts_calls() -> None:
    client = FakeClient(Ledger(), failures=1_000_000)
    client.lose()
    await asyncio.sleep(0)
    client.abandon()
    assert client.abandon() == (0, 0)
    tried = len(client.pauses)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(client.pauses) == tried
    with pytest.raises(ClientClosed):
        client.use()


async def test_a_block_that_fails_abandons_its_client_at_once() -> None:
    client = FakeClient(Ledger(unknown=1))
    with pytest.raises(ZeroDivisionError):
        async with client:
            raise ZeroDivisionError
    assert client.released == 1
