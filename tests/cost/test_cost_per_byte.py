"""The cost of a request is bounded by the bytes that its peer has sent: for every request type, as anonymous and as a plain user.

The bound is `REQUEST_CPU_MS_MAX` and `REQUEST_CPU_NS_PER_BYTE_MAX` of processor time, and the same of memory. Each case is measured
in this process with sessions that have no sockets; processor time, not time, so that a busy machine does not matter.
"""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pyarrow as pa
import pytest
from pyarrow import flight

from headrace import limits
from headrace.broker import Principal, SchemaType
from headrace.broker.groups.subscriptions import SubscriptionBook
from headrace.flight import request
from headrace.flight.bridge import Bridge
from headrace.flight.calls import Calls
from headrace.flight.login import MIDDLEWARE, Callers, LoginMiddleware
from headrace.flight.request import encode
from headrace.flight.server import FlightServer
from headrace.limits import FLIGHT_CALLS_MAX
from headrace.records import RecordBatch
from headrace.sessions.blipmq.session import BlipMqSession
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.sessions.blipmq.subscriptions import Subscriptions
from headrace.sessions.figg.session import FiggSession
from headrace.sessions.flymq.access import FlyMqAccess
from headrace.sessions.flymq.session import FlyMqSession
from headrace.sessions.fujin.session import FujinSession
from headrace.sessions.fujin.writer import WriterIds
from headrace.sessions.rustlog.session import RustLogContext, RustLogSession
from headrace.wire import blipmq, fujin
from headrace.wire.flymq.table import SPOKEN
from headrace.wire.rustlog import messages as r
from tests.access.test_flight_matrix import ACTIONS, PUTS
from tests.access.test_matrix import ROOT, World, world
from tests.access.test_protocol_matrix import FIGG
from tests.access.world import PEOPLE
from tests.conftest import Proof
from tests.cost import worst
from tests.cost.worst import LARGE, SCHEMA, TOPIC
from tests.sessions.figg.peer import TestLink
from tests.sessions.fujin.support import StreamLink
from tests.sessions.wire import Wire

CHUNK_BYTES = 256 * 1024
"""Bytes that a socket delivers at once."""
PRINCIPALS = ("anonymous", "dave")
"""A peer without a login, and a user who may read and publish."""
DEADLINE_SECONDS = 300.0


class Meter:
    """Measures cases and remembers those that cost too much."""

    def __init__(self, of_memory: bool, is_anonymous: bool) -> None:
        self.of_memory = of_memory
        self._memory_bytes_max = limits.REQUEST_MEMORY_BYTES_ANONYMOUS_MAX if is_anonymous else limits.REQUEST_MEMORY_BYTES_MAX
        self.cases = 0
        self.too_much: list[str] = []
        self.highest: list[tuple[float, str]] = []

    def check(self, label: str, size_bytes: int, cost: float) -> None:
        if self.of_memory:
            bound: float = self._memory_bytes_max + size_bytes * limits.REQUEST_MEMORY_BYTES_PER_BYTE_MAX
        else:
            bound = limits.REQUEST_CPU_MS_MAX * 1e6 + size_bytes * limits.REQUEST_CPU_NS_PER_BYTE_MAX
        self.cases += 1
        self.highest.append((cost / bound, f"{label}: {size_bytes} bytes, {cost:,.0f}"))
        if cost > bound:
            self.too_much.append(f"{label}: {cost:,.0f} for {size_bytes} bytes, at most {bound:,.0f}")

    async def session(self, label: str, link: Any, session: Any, frames: bytes) -> None:
        """Feed the frames as a connection would, and wait until they are dealt with."""
        before = self._begin()
        async with asyncio.timeout(DEADLINE_SECONDS):
            for at in range(0, len(frames), CHUNK_BYTES):
                session.receive(frames[at : at + CHUNK_BYTES])
                await self._rest(link)
        self.check(label, len(frames), self._end(before))
        session.lost()
        await asyncio.sleep(0)

    async def _rest(self, link: Any) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        while link.pauses > 0 and link.closed is None:  # noqa: ASYNC110  (it may wait for a thread or a process)
            await asyncio.sleep(0.001)

    async def call(self, label: str, size_bytes: int, call: Callable[[], object]) -> None:
        before = self._begin()
        try:
            await asyncio.wait_for(asyncio.to_thread(call), DEADLINE_SECONDS)
        except (flight.FlightError, pa.ArrowException):
            pass
        self.check(label, size_bytes, self._end(before))

    def _begin(self) -> int:
        if self.of_memory:
            tracemalloc.reset_peak()
            return tracemalloc.get_traced_memory()[0]
        return time.process_time_ns()

    def _end(self, before: int) -> int:
        return (tracemalloc.get_traced_memory()[1] if self.of_memory else time.process_time_ns()) - before


@pytest.fixture(params=["cpu", "memory"])
def meter(request: pytest.FixtureRequest, who: str, proof: Proof) -> Iterator[Meter]:
    made = Meter(request.param == "memory", who == "anonymous")
    if made.of_memory:
        tracemalloc.start()
    try:
        yield made
    finally:
        tracemalloc.stop()
    for share, label in sorted(made.highest, reverse=True)[:3]:
        print(f"{share:6.1%} {label}")
    assert made.too_much == []
    proof("requests whose cost is bounded", made.cases)


async def furnish(env: World) -> None:
    await env.broker.schemas.delete(ROOT, TOPIC)
    await env.broker.schemas.register(ROOT, TOPIC, SchemaType.JSON, SCHEMA)
    await env.broker.publish(ROOT, LARGE, RecordBatch([b"0123456789" * 10] * 3_000))


def test_every_request_type_has_its_worst_input() -> None:
    assert worst.FLYMQ_PLAIN | set(worst.FLYMQ_WORST) == SPOKEN and not worst.FLYMQ_PLAIN & set(worst.FLYMQ_WORST)
    assert worst.RUSTLOG_PLAIN | set(worst.RUSTLOG_WORST) == set(get_args(r.Request))
    assert set(worst.BLIPMQ_WORST) == set(blipmq.FrameType)
    assert set(worst.FIGG_WORST) == set(FIGG), "the table of the matrix has every request of Figg"
    assert set(worst.FUJIN_WORST) == set(fujin.Request)
    assert set(FLIGHT_BODIES) == set(request.ACTIONS) and set(FLIGHT_ROWS) == set(get_args(request.Put))


@pytest.mark.parametrize("who", PRINCIPALS)
async def test_flymq_requests_cost_no_more_than_their_bytes_pay_for(who: str, meter: Meter) -> None:
    principal = PEOPLE[who].at("flymq")
    async with world() as env:
        await furnish(env)
        for opcode in sorted(SPOKEN):
            for label, frames in worst.flymq_inputs(opcode):
                if meter.of_memory and label == "many":
                    continue  # each is forgotten before the next
                wire = Wire()
                session = FlyMqSession(wire, env.broker, principal, access=FlyMqAccess(env.access, principal, "10.0.0.1:1"))
                await meter.session(f"{who} {opcode:#04x} {label}", wire, session, frames)


@pytest.mark.parametrize("who", PRINCIPALS)
async def test_rustlog_requests_cost_no_more_than_their_bytes_pay_for(who: str, meter: Meter) -> None:
    async with world() as env:
        await furnish(env)
        context, principal = RustLogContext(ticks_ns=iter(range(1 << 30)).__next__), PEOPLE[who].at("rustlog")
        for kind in get_args(r.Request):
            for label, frames in worst.rustlog_inputs(kind):
                wire = Wire()
                session = RustLogSession(wire, env.broker, principal, context, lambda: env.access.allows_anything(principal.name))
                await meter.session(f"{who} {kind.__name__} {label}", wire, session, frames)


@pytest.mark.parametrize("who", PRINCIPALS)
async def test_blipmq_requests_cost_no_more_than_their_bytes_pay_for(who: str, meter: Meter) -> None:
    """A publish needs a key; `anonymous` is a peer without one."""
    async with world() as env:
        await furnish(env)
        book = SubscriptionBook(env.engine, "blipmq")
        subscriptions = Subscriptions(env.broker, book, clock=env.clock, settings=BlipMqSettings(), later=env.clock.later)
        await subscriptions.open()
        login = b"" if who == "anonymous" else blipmq.encoder.hello(1) + blipmq.encoder.auth(2, b"key")
        for kind, make in worst.BLIPMQ_WORST.items():
            wire = Wire()
            session = BlipMqSession(wire, env.broker, subscriptions, verify_key=lambda key: PEOPLE[who].at("blipmq"))
            await meter.session(f"{who} {kind}", wire, session, login + make())
        await subscriptions.close()


@pytest.mark.parametrize("who", PRINCIPALS)
async def test_figg_requests_cost_no_more_than_their_bytes_pay_for(who: str, meter: Meter) -> None:
    async with world() as env:
        await furnish(env)
        for kind, make in worst.FIGG_WORST.items():
            link = TestLink()
            await meter.session(f"{who} {kind}", link, FiggSession(env.broker, link, PEOPLE[who].at("figg")), make())


@pytest.mark.parametrize("who", PRINCIPALS)
async def test_fujin_requests_cost_no_more_than_their_bytes_pay_for(who: str, meter: Meter) -> None:
    async with world() as env:
        await furnish(env)
        for kind, make in worst.FUJIN_WORST.items():
            link = StreamLink()
            await meter.session(f"{who} {kind.name}", link, FujinSession(env.broker, link, PEOPLE[who].at("fujin"), WriterIds()), make())


# Flight: the client is in this process, and its work is measured with the broker's.

DEEP = b"[" * (1 << 20)
LONG = ["x" * 200] * 5_000
FLIGHT_BODIES: dict[str, bytes] = {
    **dict.fromkeys(ACTIONS, DEEP),
    "describe": encode(request.Describe(LONG)),
    "wait": encode(request.Wait({f"topic {number}": {} for number in range(5_000)}, 1)),
    "commit": encode(request.Commit("g", {TOPIC: dict.fromkeys(range(5_000), 0)})),
    "offset_for_time": encode(request.OffsetForTime(TOPIC, dict.fromkeys(range(5_000), 0))),
    "drop": encode(request.Drop(LONG)),
    "publish": encode(request.Publish(TOPIC, 1, LONG)),
}
ZEROS = pa.record_batch({"value": pa.array([bytes(1 << 20)] * 16, pa.binary())})
WIDE = pa.record_batch({"value": pa.DictionaryArray.from_arrays(pa.array([0] * 2_000, pa.int32()), pa.array([bytes(10_000)]))})
NULLS = pa.record_batch({"value": pa.nulls(100_000, pa.binary())})
FLIGHT_ROWS: dict[type, list[pa.RecordBatch]] = {
    request.Append: [ZEROS, WIDE, NULLS],
    request.Stage: [ZEROS, WIDE, NULLS],
    request.Letters: [
        pa.record_batch({"partition": [0] * 1_000, "offset": [0] * 1_000, "error": ["e" * 1_000] * 1_000, "reason": ["pipeline"] * 1_000})
    ],
}
OPTIONS = pa.ipc.IpcWriteOptions(compression="zstd")
COMPRESSED = flight.FlightCallOptions(write_options=OPTIONS)


def sent_bytes(batch: pa.RecordBatch) -> int:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=OPTIONS) as stream:
        stream.write_batch(batch)
    return int(sink.getvalue().size)


def put(client: flight.FlightClient, command: request.Request, batch: pa.RecordBatch) -> None:
    writer, answers = client.do_put(flight.FlightDescriptor.for_command(encode(command)), batch.schema, COMPRESSED)
    with writer:
        writer.write_batch(batch)
        writer.done_writing()
        answers.read()


@pytest.mark.parametrize("who", PRINCIPALS)
async def test_flight_calls_cost_no_more_than_their_bytes_pay_for(who: str, meter: Meter) -> None:
    principal: Principal = PEOPLE[who].at("flight")
    async with world() as env:
        await furnish(env)
        bridge, calls = Bridge(asyncio.get_running_loop()), Calls(FLIGHT_CALLS_MAX)
        middleware = {MIDDLEWARE: LoginMiddleware(Callers(bridge, env.access, "anonymous"), calls)}
        server = FlightServer("grpc://127.0.0.1:0", env.broker, bridge, lambda context: principal, calls, middleware=middleware)
        client = flight.connect(f"grpc://127.0.0.1:{server.port}")
        try:
            for operation, body in FLIGHT_BODIES.items():
                action = flight.Action(operation, body)
                await meter.call(f"{who} {operation}", len(body), lambda action=action: list(client.do_action(action)))  # type: ignore[misc]
            for kind, batches in FLIGHT_ROWS.items():
                for index, batch in enumerate(batches):
                    command = PUTS[kind].request(env, TOPIC)
                    env.stages += 1
                    label = f"{who} {kind.__name__} {index}"
                    await meter.call(label, sent_bytes(batch), lambda command=command, batch=batch: put(client, command, batch))  # type: ignore[misc]
        finally:
            client.close()
            await asyncio.to_thread(server.shutdown)
