"""The base of the sessions, with a protocol of its own: each byte is a request."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterable

import pytest

from headrace.errors import DiskFull, WireError
from headrace.limits import OUTPUT_HIGH_WATER_BYTES
from headrace.sessions.session import REPLY_BYTES_A_TURN, WORK_A_TURN, BaseSession

WINDOW_BYTES = 100


class Wire:
    """A `Link` that records its calls."""

    peer = "test:1"

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.closed: tuple[str, bool] | None = None
        self.pauses = self.unsent_bytes = 0

    def send(self, frames: bytes) -> None:
        self.sent.append(frames)

    def close(self, reason: str, *, error: bool = True) -> None:
        self.closed = self.closed or (reason, error)

    def pause_reading(self) -> None:
        self.pauses += 1

    def resume_reading(self) -> None:
        assert self.pauses > 0, "a resume without its pause"
        self.pauses -= 1


class ByteDecoder:
    held_bytes, held = 0, b""

    def feed(self, chunk: bytes, /) -> Iterable[str]:
        for letter in chunk.decode():
            if letter == "!":
                raise WireError("no letter")
            yield letter


class LetterSession(BaseSession[str]):
    """Capitals are owed, digits are work that waits, `.` is work that does not wait, `-` is work with a slot, others are answered at
    once, after the owed replies. The reply is the letter, and that to `~` is large."""

    def __init__(self, wire: Wire, slots: asyncio.Semaphore | None = None) -> None:
        super().__init__(wire, in_flight_bytes_max=WINDOW_BYTES, owed_max=8)
        self._decoder = ByteDecoder()
        self._slots = slots or asyncio.Semaphore(1)
        self.waits: dict[str, asyncio.Future[None]] = {}
        self.owes: dict[str, asyncio.Future[None]] = {}

    def _serves(self, message: str) -> bool:
        if message.isupper():
            self.owes[message] = self._loop.create_future()
            self._owe(self.owes[message], 20, message.encode)
            return True
        if self._owed or not self._is_writable():
            return False
        if message.isdigit() or message in ".-x":
            self._start(self._work(message))
        else:
            self._reply(message.encode() * (REPLY_BYTES_A_TURN // 2 if message == "~" else 1))
        return True

    async def _work(self, message: str) -> None:
        if message == "x":
            raise RuntimeError("a defect")
        if message == "-":
            await self._take_fetch_slot(self._slots)
            self._slots.release()
        if message.isdigit():
            self.waits[message] = self._loop.create_future()
            await self.waits[message]
        self._reply(message.encode())


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
async def session(wire: Wire) -> LetterSession:
    return LetterSession(wire)


async def turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_work_that_does_not_wait_costs_no_task_and_no_turn(wire: Wire, session: LetterSession) -> None:
    before = asyncio.all_tasks()
    session.receive(b".a.-")
    assert wire.sent == [b".a.-"] and asyncio.all_tasks() == before and wire.pauses == 0


async def test_requests_behind_work_that_waits_keep_their_order_and_the_peer_is_not_read(wire: Wire, session: LetterSession) -> None:
    session.receive(b"a1b")
    session.receive(b"2c")
    await turn()
    assert wire.sent == [b"a"] and wire.pauses == 1
    session.waits["1"].set_result(None)
    await turn()
    session.waits["2"].set_result(None)
    await turn()
    assert b"".join(wire.sent) == b"a1b2c" and wire.pauses == 0 and session.is_idle


async def test_owed_replies_leave_in_order_and_those_of_one_turn_in_one_write(wire: Wire, session: LetterSession) -> None:
    session.receive(b"ABCa")
    session.owes["B"].set_result(None)
    await turn()
    assert wire.sent == []
    session.owes["A"].set_result(None)
    session.owes["C"].set_exception(DiskFull("no space"))
    await turn()
    assert wire.sent == [b"ABCa"]


async def test_above_the_window_requests_wait_and_the_peer_is_not_read(wire: Wire, session: LetterSession) -> None:
    session.receive(b"ABCDEF")
    assert "F" not in session.owes and wire.pauses == 1
    session.owes["A"].set_result(None)
    await turn()
    assert "F" in session.owes and wire.pauses == 1, "resumes at half of the window"
    for name in "BCDEF":
        session.owes[name].set_result(None)
    await turn()
    assert b"".join(wire.sent) == b"ABCDEF" and wire.pauses == 0


async def test_much_work_in_one_chunk_is_spread_over_turns(wire: Wire, session: LetterSession) -> None:
    session.receive(b"." * (3 * WORK_A_TURN))
    assert wire.sent == [b"." * WORK_A_TURN] and wire.pauses == 1
    await turn()
    assert wire.sent == [b"." * WORK_A_TURN] * 3 and wire.pauses == 0


async def test_large_replies_are_spread_over_turns(wire: Wire, session: LetterSession) -> None:
    session.receive(b"~~~~~a")
    assert sum(map(len, wire.sent)) == REPLY_BYTES_A_TURN and wire.pauses == 1
    await asyncio.sleep(0)
    assert sum(map(len, wire.sent)) == 2 * REPLY_BYTES_A_TURN
    await turn()
    assert b"".join(wire.sent)[-2:] == b"~a" and wire.pauses == 0


async def test_a_peer_that_does_not_read_gets_its_replies_when_it_does(wire: Wire, session: LetterSession) -> None:
    wire.unsent_bytes = OUTPUT_HIGH_WATER_BYTES + 1
    session.receive(b"ab")
    assert wire.sent == [] and wire.pauses == 1
    wire.unsent_bytes = 0
    session.drained()
    assert wire.sent == [b"ab"] and wire.pauses == 0


async def test_a_drain_completes_what_was_received(wire: Wire, session: LetterSession) -> None:
    session.receive(b"A1")
    session.closing()
    session.receive(b"b")
    session.owes["A"].set_result(None)
    await turn()
    assert wire.closed is None
    session.waits["1"].set_result(None)
    await turn()
    assert b"".join(wire.sent) == b"A1" and wire.closed == ("drained", False)


async def test_requests_before_broken_bytes_are_answered(wire: Wire, session: LetterSession) -> None:
    session.receive(b"Aa!b")
    assert wire.closed is None
    session.owes["A"].set_result(None)
    await turn()
    assert wire.sent == [b"Aa"] and wire.closed == ("bad frame: no letter", True)


@pytest.mark.parametrize("request_", ["x", "A"])
async def test_a_defect_closes_the_connection_and_is_reported(wire: Wire, session: LetterSession, request_: str) -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context["exception"]))
    session.receive(b"a" + request_.encode() + b"b")
    if request_ == "A":
        session.owes["A"].set_exception(RuntimeError("a defect"))
    await turn()
    assert wire.closed == ("internal error: the request could not be completed", True)
    assert wire.sent == [b"a"] and [str(defect) for defect in reported] == ["a defect"]


async def test_a_connection_lost_before_its_task_runs_gives_its_slot_to_the_next(wire: Wire) -> None:
    slots = asyncio.Semaphore(1)
    await slots.acquire()
    gone, next_ = LetterSession(Wire(), slots), LetterSession(wire, slots)
    gone.receive(b"-")
    next_.receive(b"-")
    slots.release()
    gone.lost()
    del gone
    gc.collect()
    await turn()
    assert wire.sent == [b"-"] and not slots.locked()


async def test_work_of_a_lost_connection_is_cancelled(wire: Wire, session: LetterSession) -> None:
    session.receive(b"1a")
    await turn()
    session.lost()
    await turn()
    assert session.waits["1"].cancelled() and wire.sent == []
