"""Connection limits: in total, per address, per user, and the reserve for administrators."""

from __future__ import annotations

import asyncio

import pytest

from headrace.net.counters import AdmissionLimits, NetCounters, Slot, admit
from headrace.net.listener import Listener, NetLimits
from headrace.net.protocol import ServedProtocol, Sniff
from tests.net.polling import until
from tests.net.test_listener import Echo, Sessions, connect, listening

LIMITS = AdmissionLimits(connections_max=10, per_ip_max=8, per_user_max=2, reserved=4)


class Guarded(Sessions):
    """A protocol whose peers log in with one line: a user, with `!` in front for an administrator. The reply is `ok` or the reason."""

    def __init__(self, *, needs_login: bool = True) -> None:
        super().__init__(make=self._guard)
        self.protocol = ServedProtocol("guarded", lambda first: Sniff.YES, self._open, lambda: needs_login)

    def _guard(self, link: object) -> Echo:
        return Login(link)  # type: ignore[arg-type]  # it is a peer as well


class Login(Echo):
    def receive(self, data: bytes) -> None:
        user = data.decode().strip()
        if user == "hello":
            self.link.send(b"who?\n")
            return
        rejection: str | None = self.link.logged_in(user.lstrip("!"), is_admin=user.startswith("!"))  # type: ignore[attr-defined]
        self.link.send((rejection or "ok").encode() + b"\n")


async def said(listener: Listener, line: str) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """Return the reply to this line; empty if the connection was rejected."""
    reader, writer = await connect(listener)
    try:
        writer.write(line.encode() + b"\n")
        return await reader.readline(), reader, writer
    except ConnectionError:
        return b"", reader, writer


def test_the_last_places_are_admitted_to_the_reserve_and_one_address_gets_a_part_of_it() -> None:
    counters = NetCounters()
    for number in range(6):
        assert admit(LIMITS, counters, f"10.0.0.{number}") is Slot.REGULAR
        counters.enter(f"10.0.0.{number}")
    for number in range(4):
        assert admit(LIMITS, counters, f"10.1.0.{number}") is Slot.RESERVED
        counters.enter(f"10.1.0.{number}")
        counters.enter_reserve(f"10.1.0.{number}")
        assert admit(LIMITS, counters, f"10.1.0.{number}") == "too many connections: 6 are open"
    assert admit(LIMITS, counters, "10.2.0.1") == "too many connections: 6 are open"


def test_an_address_at_its_limit_may_still_send_an_administrator() -> None:
    counters, limits = NetCounters(), AdmissionLimits(100, 2, 0, 4)
    for _ in range(2):
        counters.enter("10.0.0.1")
    assert admit(limits, counters, "10.0.0.1") is Slot.RESERVED
    counters.enter("10.0.0.1")
    counters.enter_reserve("10.0.0.1")
    assert admit(limits, counters, "10.0.0.1") == "too many connections from one address: 2 are open"


async def test_a_peer_that_does_not_log_in_is_closed_at_the_deadline() -> None:
    sessions = Guarded()
    async with listening([sessions.protocol], NetLimits(login_seconds=0.2)) as listener:
        answer, reader, writer = await said(listener, "hello")
        assert answer == b"who?\n"
        async with asyncio.timeout(300):
            assert await reader.read() == b""
        assert listener.counters.rejected == {"no login in time": 1}
        writer.close()


@pytest.mark.parametrize(("line", "needs_login"), [("ann", True), ("hello", False)])
async def test_the_deadline_is_over_with_a_login_and_where_none_is_needed(line: str, needs_login: bool) -> None:
    sessions = Guarded(needs_login=needs_login)
    async with listening([sessions.protocol], NetLimits(login_seconds=0.05)) as listener:
        _, reader, writer = await said(listener, line)
        await asyncio.sleep(0.2)
        writer.write(b"hello\n")
        assert await reader.readline() == b"who?\n"
        writer.close()


async def test_when_every_slot_is_in_use_an_administrator_still_gets_in_and_no_other_user_does() -> None:
    sessions = Guarded(needs_login=False)
    limits = NetLimits(connections_max=4, connections_reserved=2, login_seconds=30.0)
    async with listening([sessions.protocol], limits) as listener:
        kept = [await said(listener, "hello") for _ in range(2)]
        answer, _, writer = await said(listener, "ann")
        assert answer == b"too many connections: 2 are open, and the rest is reserved for administrators\n"
        writer.transport.abort()
        await until(lambda: listener.counters.open == 2)
        answer, _, admin = await said(listener, "!root")
        assert answer == b"ok\n"
        assert listener.counters.reserved_open == 1
        kept.pop()[2].transport.abort()
        await until(lambda: listener.counters.open == 2)
        answer, _, writer = await said(listener, "ann")
        assert answer == b"ok\n", "a regular slot is free again"
        for open_writer in (admin, writer, kept[0][2]):
            open_writer.transport.abort()
        await until(lambda: listener.counters.open == 0)
        assert listener.counters.reserved_open == 0
        assert (listener.counters.reserved_by_host, listener.counters.open_by_user) == ({}, {})


async def test_a_place_in_the_reserve_is_lost_without_a_login() -> None:
    sessions = Guarded(needs_login=False)
    limits = NetLimits(connections_max=2, connections_reserved=1, login_seconds=0.2)
    async with listening([sessions.protocol], limits) as listener:
        _, kept_reader, kept = await said(listener, "hello")
        _, reader, writer = await said(listener, "hello")
        async with asyncio.timeout(300):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: listener.counters.open == 1)
        kept.write(b"hello\n")
        assert await kept_reader.readline() == b"who?\n"
        kept.close()


async def test_one_user_has_so_many_connections_and_others_and_administrators_have_theirs() -> None:
    sessions = Guarded()
    async with listening([sessions.protocol], NetLimits(connections_per_user_max=2)) as listener:
        answers = [await said(listener, user) for user in ("ann", "ann", "ann", "ben", "!root", "!root", "!root")]
        refused = b"too many connections of one user: 2 are open\n"
        assert [answer for answer, _, _ in answers] == [b"ok\n", b"ok\n", refused, b"ok\n", b"ok\n", b"ok\n", b"ok\n"]
        answers[0][2].transport.abort()
        await until(lambda: listener.counters.open_by_user.get("ann") == 1)
        assert (await said(listener, "ann"))[0] == b"ok\n"
