"""The authorization matrix of the Flight endpoint: every action, put and read, every kind of principal, every name."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import get_args

import pyarrow as pa
import pytest
from pyarrow import flight

from headrace.broker import Principal
from headrace.flight import request
from headrace.flight.bridge import Bridge
from headrace.flight.calls import Calls
from headrace.flight.login import MIDDLEWARE, Callers, LoginMiddleware
from headrace.flight.request import encode
from headrace.flight.server import FlightServer
from headrace.limits import FLIGHT_CALLS_MAX
from tests.access.test_matrix import EXISTING, ROOT, SEES, SEES_AND_GROUP, WRITES, WRITES_NOTHING_YET, Tally, World, world
from tests.access.world import INTERNAL, NAMES, PEOPLE, needed
from tests.conftest import Proof

PROTOCOL = "flight"


@dataclass(frozen=True)
class Row:
    """`needs` of a topic that exists; `absent` of one that does not, where that differs."""

    request: Callable[[World, str], request.Request]
    needs: str
    absent: str | None = None

    def of(self, name: str) -> str:
        return self.needs if self.absent is None or name in EXISTING else self.absent


ACTIONS: dict[str, Row] = {
    "topics": Row(lambda w, n: request.Topics(), ""),
    "describe": Row(lambda w, n: request.Describe([n]), SEES),
    "split": Row(lambda w, n: request.Split(n, 0, 0, 1, 2), SEES),
    "local_file": Row(lambda w, n: request.LocalFile(""), ""),
    "locate": Row(lambda w, n: request.Locate(n, 0, 0, 0), "read t"),
    "commit": Row(lambda w, n: request.Commit(n, {n: {0: 0}}), "commit g & read t"),
    "committed": Row(lambda w, n: request.Committed(n, n), SEES_AND_GROUP, SEES),
    "offset_for_time": Row(lambda w, n: request.OffsetForTime(n, {0: 0}), SEES),
    "wait": Row(lambda w, n: request.Wait({n: {}}, 1), SEES),
    "schema": Row(lambda w, n: request.Schema(n), "describe t", SEES),
    "create_topic": Row(lambda w, n: request.CreateTopic(n), "create t"),
    "ensure_topic": Row(lambda w, n: request.EnsureTopic(n), SEES, "create t"),
    "publish": Row(lambda w, n: request.Publish(n, 1, [w.staged.get(n, "none")]), "publish a & publish t", "publish a"),
    "drop": Row(lambda w, n: request.Drop([w.staged.get(n, "none")]), "publish a & publish t", "never"),
    "last_version": Row(lambda w, n: request.LastVersion(n), WRITES, WRITES_NOTHING_YET),
    "status": Row(lambda w, n: request.Status(), ""),
    "topic_counters": Row(lambda w, n: request.TopicCounters(), ""),
}
PUTS: dict[type, Row] = {
    request.Append: Row(lambda w, n: request.Append(n), "publish t", SEES),
    request.Stage: Row(lambda w, n: request.Stage(f"new {w.stages} {n}", n, n), "publish a & publish t", SEES),
    request.Letters: Row(lambda w, n: request.Letters(n), "read t & publish d"),
}
READS: dict[str, str] = {"do_get": "read t", "get_flight_info": SEES}
ROWS = pa.RecordBatch.from_pydict({"value": [b"x"]})
LETTERS = pa.RecordBatch.from_pydict({"partition": [9], "offset": [0], "error": [""], "reason": ["pipeline"]})


def test_every_action_and_every_put_has_a_row() -> None:
    assert set(ACTIONS) == set(request.ACTIONS)
    assert set(PUTS) == set(get_args(request.Put))
    calls = {name for name in vars(FlightServer) if not name.startswith("_")}
    assert calls == {*READS, "do_put", "do_action", "list_flights", "list_actions", "do_exchange"}, "do_exchange is not supported"


def act(client: flight.FlightClient, action: flight.Action) -> bytes:
    (answer,) = client.do_action(action)
    if action.type == "drop" and answer.body.to_pybytes() == b"0":
        raise flight.FlightUnauthorizedError("a stage of another writer counts as unknown")
    return bytes(answer.body.to_pybytes())


def put(client: flight.FlightClient, command: request.Request) -> None:
    batch = LETTERS if isinstance(command, request.Letters) else ROWS
    writer, answers = client.do_put(flight.FlightDescriptor.for_command(encode(command)), batch.schema)
    with writer:
        writer.write_batch(batch)
        writer.done_writing()
        answers.read()


def read(client: flight.FlightClient, call: str, name: str) -> None:
    if call == "do_get":
        client.do_get(flight.Ticket(encode(request.Range(name)))).read_all()
    else:
        client.get_flight_info(flight.FlightDescriptor.for_path(name, "0"))


async def allowed(ask: Callable[..., object], *arguments: object) -> bool:
    """Return whether the call passed authorization, whatever its outcome."""
    try:
        await asyncio.to_thread(ask, *arguments)
    except flight.FlightUnauthorizedError:
        return False
    except flight.FlightError:
        pass
    return True


@asynccontextmanager
async def flight_client(harness: World, principal: Principal) -> AsyncIterator[flight.FlightClient]:
    """Serve the Flight endpoint and connect to it as this principal."""
    bridge, calls = Bridge(asyncio.get_running_loop()), Calls(FLIGHT_CALLS_MAX)
    middleware = {MIDDLEWARE: LoginMiddleware(Callers(bridge, harness.access, "anonymous"), calls)}
    server = FlightServer("grpc://127.0.0.1:0", harness.broker, bridge, lambda context: principal, calls, middleware=middleware)
    client = flight.connect(f"grpc://127.0.0.1:{server.port}")
    try:
        yield client
    finally:
        client.close()
        await asyncio.to_thread(server.shutdown)


@pytest.mark.parametrize("who", PEOPLE)
async def test_every_flight_call_is_answered_as_the_policy_says(who: str, proof: Proof) -> None:
    tally, principal = Tally(), PEOPLE[who].at(PROTOCOL)
    async with world() as harness, flight_client(harness, principal) as client:
        for name in NAMES:
            if name in harness.staged:
                await harness.broker.seal(ROOT, harness.staged[name])
            for method, row in ACTIONS.items():
                action = flight.Action(method, encode(row.request(harness, name)))
                needs = SEES if name == INTERNAL and method == "ensure_topic" else row.of(name)
                tally.add(f"{method} {name}", await allowed(act, client, action), needed(who, PROTOCOL, needs, name))
                await harness.restore(name)
            for kind, row in PUTS.items():
                command = row.request(harness, name)
                tally.add(f"{kind.__name__} {name}", await allowed(put, client, command), needed(who, PROTOCOL, row.of(name), name))
                await harness.restore(name)
            for call, needs in READS.items():
                tally.add(f"{call} {name}", await allowed(read, client, call, name), needed(who, PROTOCOL, needs, name))
        visible = {name for name in EXISTING if needed(who, PROTOCOL, SEES, name)}
        flights = await asyncio.to_thread(lambda: [info.descriptor.path[0].decode() for info in client.list_flights()])
        (listed,) = await asyncio.to_thread(lambda: list(client.do_action(flight.Action("topics", b""))))
        tally.add("list_flights", set(flights) == visible, True)
        tally.add("topics", set(json.loads(listed.body.to_pybytes())) == visible, True)
    assert tally.wrong == []
    proof("authorization cases", tally.cases)
