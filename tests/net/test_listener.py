"""Listeners and connections, with test sessions."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import cast

import pytest

from headrace.limits import END_LINES_PER_MINUTE_MAX, OUTPUT_HIGH_WATER_BYTES
from headrace.net.connection import Connection
from headrace.net.counters import LINE_KEYS_MAX, REASONS_MAX, LineLimit, NetCounters
from headrace.net.listener import Listener, NetLimits
from headrace.net.protocol import ServedProtocol, Sniff, choose
from headrace.net.sockets import BorrowedSocket
from headrace.sessions.contract import Link
from tests.net.polling import WAIT_SECONDS, until
from tests.net.proxy import FaultProxy


class Echo:
    """Echoes its input and records its callbacks."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.received = b""
        self.held_bytes = 0
        self.owes_reply = False
        self.events: list[str] = []
        self.changed = asyncio.Event()

    def receive(self, data: bytes) -> None:
        self.received += data
        self.link.send(data)
        self.changed.set()

    def drained(self) -> None:
        self.note("drained")

    def closing(self) -> None:
        self.note("closing")
        self.link.send(b"bye")
        self.link.close("done", error=False)

    def lost(self) -> None:
        self.note("lost")

    def note(self, event: str) -> None:
        self.events.append(event)
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


class Sessions:
    """A protocol that records its sessions."""

    def __init__(
        self, name: str = "echo", make: Callable[[Link], Echo] = Echo, sniff: Callable[[bytes], Sniff] = lambda first: Sniff.YES
    ) -> None:
        self.opened: list[Echo] = []
        self._make = make
        self.protocol = ServedProtocol(name, sniff, self._open)

    def _open(self, link: Link) -> Echo:
        self.opened.append(self._make(link))
        return self.opened[-1]


@asynccontextmanager
async def listening(
    protocols: Sequence[ServedProtocol], limits: NetLimits = NetLimits(), counters: NetCounters | None = None
) -> AsyncIterator[Listener]:
    listener = await Listener.open("127.0.0.1", 0, protocols, limits, counters)
    try:
        yield listener
    finally:
        await listener.drain(0.0)


async def connect(listener: Listener | FaultProxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(listener.host, listener.port)


def starts_with(prefix: bytes) -> Callable[[bytes], Sniff]:
    def sniff(first: bytes) -> Sniff:
        if len(first) < len(prefix):
            return Sniff.MORE if prefix.startswith(first) else Sniff.NO
        return Sniff.YES if first.startswith(prefix) else Sniff.NO

    return sniff


async def test_bytes_go_in_and_out_and_are_counted() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        counters = listener.counters
        assert (counters.accepted, counters.open, counters.bytes_in, counters.bytes_out) == (1, 1, 5, 5)
        assert (counters.opened_by_protocol, counters.open_by_protocol) == ({"echo": 1}, {"echo": 1})
        assert sessions.opened[0].link.peer == "{}:{}".format(*writer.get_extra_info("sockname"))
        writer.transport.abort()
        await sessions.opened[0].until(lambda: "lost" in sessions.opened[0].events)
        assert (counters.open, counters.open_by_protocol, counters.open_by_host) == (0, {"echo": 0}, {})


async def test_small_answers_are_not_delayed_and_dead_machines_are_found_out() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        await reader.readexactly(1)
        (link,) = [session.link for session in sessions.opened]
        accepted = link._transport.get_extra_info("socket")  # type: ignore[attr-defined]  # the option is not part of a link
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        writer.close()


def test_a_borrowed_socket_leaves_its_descriptor_open() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        borrowed = BorrowedSocket(ours.family, ours.type, ours.proto, fileno=ours.fileno())
        assert borrowed.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
        del borrowed
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"


class _RecordedSocket(BorrowedSocket):
    """Records the options that are set."""

    options: list[tuple[int, int, int]]

    def setsockopt(self, level: int, option: int, value: int) -> None:  # type: ignore[override]  # the only form that is used
        super().setsockopt(level, option, value)
        self.options.append((level, option, value))


class _Quiet(Echo):
    """Answers only what ends with a question mark."""

    def receive(self, data: bytes) -> None:
        if data.endswith(b"?"):
            super().receive(data)
        else:
            self.received += data
            self.changed.set()


async def test_input_without_a_reply_is_acknowledged_at_once() -> None:
    sessions = Sessions(make=_Quiet)
    quick = (socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
    async with listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"first?")
        assert await reader.readexactly(6) == b"first?"
        session = sessions.opened[0]
        connection = cast(Connection, session.link)
        recorded = connection._socket = _RecordedSocket.of(connection._transport)
        recorded.options = []
        writer.write(b"x")
        await session.until(lambda: session.received.endswith(b"?x"))
        assert recorded.options == [quick]
        writer.write(b"y")
        await session.until(lambda: session.received.endswith(b"?xy"))
        assert recorded.options == [quick] * 2, "the kernel clears the option, so each read sets it again"
        writer.write(b"last?")
        assert await reader.readexactly(5) == b"last?"
        assert recorded.options == [quick] * 2, "a reply carries the acknowledgement"
        session.owes_reply = True
        writer.write(b"z")
        await session.until(lambda: session.received.endswith(b"z"))
        assert recorded.options == [quick] * 2, "a reply that is owed will carry it"
        session.held_bytes = 1
        writer.write(b"0")
        await session.until(lambda: session.received.endswith(b"z0"))
        assert recorded.options == [quick] * 3, "the rest of a frame may wait for it"
        writer.close()


@pytest.mark.parametrize("leave", ["close", "abort"])
async def test_a_connection_that_is_not_read_knows_when_its_peer_has_left(leave: str) -> None:
    sessions = Sessions()
    async with listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        await reader.readexactly(1)
        link = sessions.opened[0].link
        assert isinstance(link, Connection)
        link.pause_reading()
        writer.write(b"unread")
        await writer.drain()
        assert not link.has_peer_left
        getattr(writer.transport, leave)()
        await until(lambda: link.has_peer_left)
        assert sessions.opened[0].received == b"x"
        link.abort("over")


async def test_protocols_are_told_apart_by_the_first_bytes_however_they_are_cut() -> None:
    abc, abd = Sessions("abc", sniff=starts_with(b"abc")), Sessions("abd", sniff=starts_with(b"abd"))
    async with listening([abc.protocol, abd.protocol]) as listener, FaultProxy(listener.host, listener.port) as proxy:
        proxy.chunk_bytes = 1
        for word in (b"abd", b"abc"):
            reader, writer = await connect(proxy)
            writer.write(word + b"...")
            assert await reader.readexactly(6) == word + b"..."
            writer.close()
        assert ([session.received for session in abc.opened], [session.received for session in abd.opened]) == ([b"abc..."], [b"abd..."])


def test_a_sure_protocol_wins_over_one_that_still_wonders() -> None:
    long, short = Sessions("long", sniff=starts_with(b"abc")).protocol, Sessions("short", sniff=starts_with(b"a")).protocol
    assert choose([long, short], b"a") is short
    assert choose([long], b"a") is Sniff.MORE
    assert choose([long, short], b"x") is Sniff.NO


async def test_unknown_first_bytes_are_turned_away_and_counted() -> None:
    protocols = [Sessions("abc", sniff=starts_with(b"abc")).protocol, Sessions("xyz", sniff=starts_with(b"xyz")).protocol]
    async with listening(protocols) as listener:
        reader, writer = await connect(listener)
        writer.write(b"abX\xff")
        assert await reader.read() == b""
        assert listener.counters.rejected == {"unknown protocol": 1}
        writer.close()


async def test_a_protocol_that_never_decides_is_not_fed_for_ever() -> None:
    protocols = [Sessions("a", sniff=lambda first: Sniff.MORE).protocol, Sessions("b", sniff=lambda first: Sniff.NO).protocol]
    async with listening(protocols) as listener:
        reader, writer = await connect(listener)
        writer.write(bytes(1_000))
        assert await reader.read() == b""
        assert listener.counters.rejected == {"unknown protocol": 1}
        writer.close()


@pytest.mark.parametrize("first", [b"", b"a"])
async def test_a_peer_that_says_nothing_recognisable_in_time_is_closed(first: bytes) -> None:
    protocols = [Sessions("abc", sniff=starts_with(b"abc")).protocol, Sessions("xyz", sniff=starts_with(b"xyz")).protocol]
    async with listening(protocols, NetLimits(handshake_seconds=0.05)) as listener:
        reader, writer = await connect(listener)
        writer.write(first)
        assert await reader.read() == b""
        assert listener.counters.rejected == {"no first message in time": 1}
        writer.close()


async def test_the_handshake_deadline_ends_with_the_handshake() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol], NetLimits(handshake_seconds=0.5)) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        await reader.readexactly(1)
        await asyncio.sleep(0.7)
        writer.write(b"y")
        assert await reader.readexactly(1) == b"y"
        writer.close()


async def test_one_connection_more_than_allowed_is_rejected_and_the_others_live() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol], NetLimits(connections_max=2)) as listener:
        kept = [await connect(listener) for _ in range(2)]
        await until(lambda: listener.counters.open == 2)
        reader, writer = await connect(listener)
        with pytest.raises(ConnectionError):
            if await reader.read() == b"":
                raise ConnectionResetError
        assert listener.counters.rejected == {"too many connections": 1}
        for reader, writer in kept:
            writer.write(b"x")
            assert await reader.readexactly(1) == b"x"
        kept.pop()[1].transport.abort()
        await until(lambda: listener.counters.open == 1)
        reader, writer = await connect(listener)
        writer.write(b"again")
        assert await reader.readexactly(5) == b"again"


async def test_the_limit_holds_for_all_listeners_that_share_their_counters() -> None:
    sessions, counters = Sessions(), NetCounters()
    limits = NetLimits(connections_per_ip_max=1)
    async with listening([sessions.protocol], limits, counters) as one, listening([sessions.protocol], limits, counters) as two:
        _, kept = await connect(one)
        await until(lambda: counters.open == 1)
        _, refused = await connect(two)
        await until(lambda: counters.rejected == {"too many connections from one address": 1})
        for writer in (kept, refused):
            writer.close()


class Flood(Echo):
    """Replies to the first byte with ten megabytes and obeys the high-water mark."""

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.left = 10 << 20
        self.most_unsent = 0

    def receive(self, data: bytes) -> None:
        self.drained()

    def drained(self) -> None:
        self.note("drained")
        while self.left and self.link.unsent_bytes <= OUTPUT_HIGH_WATER_BYTES:
            self.link.send(bytes(65_536))
            self.left -= 65_536
            self.most_unsent = max(self.most_unsent, self.link.unsent_bytes)


async def test_a_session_that_minds_the_high_water_mark_is_told_to_go_on_and_stays_bounded() -> None:
    sessions = Sessions(make=Flood)
    async with listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        await until(lambda: bool(sessions.opened) and sessions.opened[0].link.unsent_bytes > OUTPUT_HIGH_WATER_BYTES)
        assert len(await reader.readexactly(10 << 20)) == 10 << 20
        (session,) = sessions.opened
        assert isinstance(session, Flood)
        assert session.left == 0
        assert session.most_unsent <= OUTPUT_HIGH_WATER_BYTES + 65_536
        writer.close()


async def test_a_peer_that_asks_and_never_reads_is_no_longer_read() -> None:
    """The echo ignores the high-water mark; the connection must still limit it."""
    sessions = Sessions()
    async with listening([sessions.protocol], NetLimits(output_bytes_max=1 << 20)) as listener:
        _, writer = await connect(listener)
        for _ in range(64):
            writer.write(bytes(1 << 20))
        await until(lambda: listener.counters.reading_pauses == 1)
        (session,) = sessions.opened
        assert session.link.unsent_bytes < 2 << 20
        assert listener.counters.bytes_in < 32 << 20
        writer.transport.abort()


async def test_a_choked_peer_that_reads_again_gets_everything() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol], NetLimits(output_bytes_max=1 << 20)) as listener:
        reader, writer = await connect(listener)
        for _ in range(32):
            writer.write(bytes(1 << 20))
        await until(lambda: listener.counters.reading_pauses > 0)
        assert len(await reader.readexactly(32 << 20)) == 32 << 20
        writer.close()


async def test_pauses_are_counted_and_a_paused_peer_is_not_read() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        await reader.readexactly(1)
        (session,) = sessions.opened
        session.link.pause_reading()
        session.link.pause_reading()
        writer.write(b"later")
        await asyncio.sleep(0.05)
        session.link.resume_reading()
        await asyncio.sleep(0.05)
        assert session.received == b"x"
        session.link.resume_reading()
        assert await reader.readexactly(5) == b"later"
        assert listener.counters.reading_pauses == 1
        writer.close()


async def test_what_was_sent_before_a_close_arrives_even_if_the_peer_goes_on_sending() -> None:
    """Without lingering, the unread bytes would cause a reset that drops the reply."""
    sessions = Sessions()
    async with listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        await reader.readexactly(1)
        (session,) = sessions.opened
        session.link.pause_reading()
        writer.write(bytes(1 << 20))
        await asyncio.sleep(0.02)
        session.link.send(b"last words" * 100_000)
        session.link.close("enough: of this")
        session.link.send(b"never sent")
        session.link.close("second reason")
        writer.write(bytes(1 << 20))
        assert await reader.read() == b"last words" * 100_000
        writer.close()
        await session.until(lambda: session.events == ["lost"] or session.events == ["drained", "lost"])
        assert session.received == b"x"
        assert listener.counters.rejected == {"enough": 1}


async def test_a_peer_that_never_takes_the_last_words_is_cut_off() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol], NetLimits(linger_seconds=0.05)) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        await reader.readexactly(1)
        (session,) = sessions.opened
        session.link.send(bytes(64 << 20))
        session.link.close("too slow")
        await session.until(lambda: "lost" in session.events)
        writer.transport.abort()


async def test_a_peer_that_finishes_sending_still_gets_its_answers() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"question")
        writer.write_eof()
        assert await reader.read() == b"questionbye"
        (session,) = sessions.opened
        await session.until(lambda: session.events == ["closing", "lost"])
        writer.close()


# Errors that the protocol cannot report.


class Refusing(Echo):
    """Acknowledges the first bytes and closes with an error."""

    def receive(self, data: bytes) -> None:
        super().receive(data)
        self.link.close("not_authorized: nobody may do that")


def refusing(pause_seconds: float) -> Sessions:
    sessions = Sessions(make=Refusing)
    sessions.protocol = replace(sessions.protocol, error_pause_seconds=pause_seconds)
    return sessions


async def test_an_error_that_the_protocol_cannot_report_closes_after_a_pause() -> None:
    sessions = refusing(3_600.0)
    async with asyncio.timeout(WAIT_SECONDS), listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        assert await reader.readexactly(1) == b"x", "replies are sent at once"
        writer.write(b"ignored")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read()
        assert listener.counters.rejected == {"not_authorized": 1}
        writer.close()
        await sessions.opened[0].until(lambda: "lost" in sessions.opened[0].events)
        assert listener.counters.open == 0, "a peer that leaves does not keep the slot"


async def test_the_pause_ends_and_does_not_delay_a_drain() -> None:
    for sessions, is_draining in ((refusing(0.01), False), (refusing(3_600.0), True)):
        async with asyncio.timeout(WAIT_SECONDS), listening([sessions.protocol]) as listener:
            reader, writer = await connect(listener)
            writer.write(b"x")
            await reader.readexactly(1)
            if is_draining:
                await listener.drain(WAIT_SECONDS)
            assert await reader.read() == b""
            writer.close()


async def test_there_is_no_pause_while_slots_are_scarce() -> None:
    sessions = refusing(3_600.0)
    async with asyncio.timeout(WAIT_SECONDS), listening([sessions.protocol], NetLimits(connections_max=1)) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        assert await reader.read() == b"x"
        writer.close()


async def test_the_same_error_from_one_address_is_logged_a_few_times_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    sessions = refusing(0.0)
    async with asyncio.timeout(WAIT_SECONDS), listening([sessions.protocol]) as listener:
        for _ in range(20):
            reader, writer = await connect(listener)
            writer.write(b"x")
            await reader.read()
            writer.close()
        assert listener.counters.rejected == {"not_authorized": 20}
    lines = [record for record in caplog.records if record.getMessage() == "connection closed" and record.levelname == "WARNING"]
    assert len(lines) == END_LINES_PER_MINUTE_MAX


def test_the_next_line_after_a_minute_tells_how_many_were_left_out() -> None:
    limit = LineLimit(lines_max=2)
    assert [limit.left_out("a", float(second)) for second in range(4)] == [0, 0, None, None]
    assert limit.left_out("b", 4.0) == 0
    assert [limit.left_out("a", now) for now in (60.0, 61.0, 62.0)] == [2, 0, None]
    for key in range(LINE_KEYS_MAX + 10):
        limit.left_out(key, 63.0)
    assert len(limit._lines) == LINE_KEYS_MAX


async def test_draining_closes_the_protocol_and_lets_sessions_finish() -> None:
    sessions = Sessions()
    async with listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        await reader.readexactly(1)
        _, silent = await connect(listener)
        await until(lambda: listener.counters.open == 2)
        draining = asyncio.ensure_future(listener.drain(WAIT_SECONDS))
        assert await reader.read() == b"bye"
        writer.close()
        silent.close()
        assert await draining == 0
        with pytest.raises(OSError):
            await connect(listener)
        assert sessions.opened[0].events == ["closing", "lost"]


class Stubborn(Echo):
    def closing(self) -> None:
        self.note("closing")


async def test_draining_cuts_off_who_does_not_finish_in_time() -> None:
    sessions = Sessions(make=Stubborn)
    async with listening([sessions.protocol]) as listener:
        reader, writer = await connect(listener)
        writer.write(b"x")
        await reader.readexactly(1)
        assert await listener.drain(0.05) == 1
        await sessions.opened[0].until(lambda: sessions.opened[0].events == ["closing", "lost"])
        assert listener.counters.open == 0
        writer.close()


async def test_a_taken_address_is_an_os_error() -> None:
    async with listening([Sessions().protocol]) as listener:
        with pytest.raises(OSError):
            await Listener.open(listener.host, listener.port, [Sessions().protocol])


async def test_the_address_names_host_and_port() -> None:
    async with listening([Sessions().protocol]) as listener:
        assert listener.address == f"127.0.0.1:{listener.port}" and listener.port > 0


def test_peers_cannot_grow_the_table_of_reasons() -> None:
    counters = NetCounters()
    for number in range(1_000):
        counters.count_end(f"made up {number}", error=True)
        counters.count_end(f"malformed: {number}", error=False)
    assert len(counters.rejected) == REASONS_MAX + 1 and counters.rejected["other"] == 1_000 - REASONS_MAX
    assert counters.closed == {"malformed": 1_000}
