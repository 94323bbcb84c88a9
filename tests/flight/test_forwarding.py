"""Two brokers on one log, of which one is the coordinator. The Flight endpoint of the other one passes calls on to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import flight

from headrace.access.access import Mode
from headrace.broker.authorizer import Principal
from headrace.errors import LoginFailed, NotAuthorized, NotCoordinator
from headrace.flight import request
from headrace.flight.client import FlightClient, Servers
from headrace.flight.endpoint import Endpoint, EndpointSettings
from headrace.flight.forwarding import FORWARDED, Forwarding
from tests.canaries import secret
from tests.net import test_tls
from tests.net.polling import until
from tests.net.proxy import FaultProxy
from tests.server.test_handover import PASSWORD, SECONDS, Pair, connected

ADMIN = Principal("admin", "flight")
ROWS = pa.RecordBatch.from_pydict({"value": pa.array([b"1", b"2"], pa.binary())})


class Endpoints(Pair):
    """Both brokers with their Flight endpoints."""

    owner_endpoint: Endpoint
    other_endpoint: Endpoint
    forwarding: Forwarding
    location = ""
    """Where the other broker believes the endpoint of the coordinator to be."""

    def client(self, **login: str) -> FlightClient:
        return FlightClient(Servers.parse(self.other_endpoint.address, **login))


@asynccontextmanager
async def endpoints(
    mode: Mode = Mode.OPEN, wait_seconds: float = SECONDS, owner: EndpointSettings = EndpointSettings(), ca: bytes = b""
) -> AsyncIterator[Endpoints]:
    async with asyncio.timeout(2 * SECONDS), Endpoints(mode) as pair:
        pair.forwarding = Forwarding(lambda: pair.location, ca, wait_seconds=wait_seconds)
        pair.owner_endpoint = await Endpoint.open("127.0.0.1", 0, pair.owner.broker, pair.owner.access, owner)
        settings = EndpointSettings(forwarding=pair.forwarding)
        pair.other_endpoint = await Endpoint.open("127.0.0.1", 0, pair.other.broker, pair.other.access, settings)
        pair.location = f"grpc+tcp://{pair.owner_endpoint.address}"
        try:
            yield pair
        finally:
            await pair.other_endpoint.drain(5)
            await pair.owner_endpoint.drain(5)


async def test_groups_and_exactly_once_writers_work_at_the_other_broker() -> None:
    def use(client: FlightClient) -> None:
        with client:
            client.create_topic("t")
            client.append("t", [ROWS], partition=0)
            assert client.stage("h", [ROWS] * 3, topic="t", writer="w").records == 6
            assert client.publish("w", 0, ["h"]).records == 6
            assert client.publish("w", 0, ["h"]).already
            client.commit("g", {"t": {0: 2}})
            assert client.committed("g", "t") == {0: 2}
            assert client.describe(["t"])["t"].partitions[0].end == 8

    async with endpoints() as pair:
        await asyncio.to_thread(use, pair.client())


async def test_the_coordinator_checks_the_caller_itself() -> None:
    async with endpoints(Mode.ENFORCED) as pair:
        async with connected(pair.owner, user="admin", password=PASSWORD) as admin:
            await admin.create_topic("t")
            await admin.create_user("bob", PASSWORD, ["producer"])
        await until(lambda: "bob" in pair.other.access.policy.users)

        def use() -> None:
            with pair.client(user="admin", password=PASSWORD) as client:
                client.commit("g", {"t": {0: 0}})
                assert client.committed("g", "t") == {0: 0}
            with pair.client(user="bob", password=PASSWORD) as client, pytest.raises(NotAuthorized):
                client.commit("g", {"t": {0: 0}})
            with pair.client(user="admin", password=secret("wrong")) as client, pytest.raises(LoginFailed):
                client.commit("g", {"t": {0: 0}})

        await asyncio.to_thread(use)


async def test_a_put_whose_rows_break_off_stages_nothing_at_the_coordinator() -> None:
    class Broken(Exception):
        pass

    def rows() -> Iterator[pa.RecordBatch]:
        yield ROWS
        raise Broken

    def use(client: FlightClient) -> None:
        with client:
            client.create_topic("t")
            client.stage("whole", [ROWS], topic="t", writer="w")
            with pytest.raises(Broken):
                client.stage("broken", rows(), topic="t", writer="w")

    async with endpoints() as pair:
        await asyncio.to_thread(use, pair.client())
        await until(lambda: not pair.owner_endpoint.calls.under_way and not pair.other_endpoint.calls.under_way)
        assert [stage.handle for stage in pair.owner.broker.stages(ADMIN)] == ["whole"]


async def test_without_a_coordinator_or_with_a_forwarded_call_the_error_is_that_of_the_broker() -> None:
    async with endpoints(wait_seconds=0.3) as pair:

        def forwarded() -> None:
            with pair.client() as client:
                client.create_topic("t")
            body = request.encode(request.Committed("g", "t"))
            plain = flight.FlightClient(f"grpc+tcp://{pair.other_endpoint.address}")
            options = flight.FlightCallOptions(headers=[(FORWARDED.encode(), b"1")])
            with pytest.raises(flight.FlightUnavailableError, match="not_coordinator"):
                list(plain.do_action(flight.Action("committed", body), options))

        def alone() -> None:
            with pair.client() as client, pytest.raises(NotCoordinator):
                client.committed("g", "t")

        await asyncio.to_thread(forwarded)
        pair.location = ""
        await asyncio.to_thread(alone)


async def test_a_coordinator_with_tls_is_verified_before_a_caller_is_logged_in_there(tmp_path: Path) -> None:
    files = test_tls.files(tmp_path)
    owner = EndpointSettings(certificate=files.certificate.read_bytes(), key=files.key.read_bytes())
    login = {"user": "admin", "password": PASSWORD}
    async with endpoints(Mode.ENFORCED, owner=owner, ca=test_tls.CA.cert_pem.bytes()) as pair:
        port = pair.owner_endpoint.address.rpartition(":")[2]
        pair.location = f"grpc+tls://localhost:{port}"

        def use() -> None:
            with pair.client(**login) as client:
                client.create_topic("t")
                assert client.stage("h", [ROWS], topic="t", writer="w").records == 2
                assert client.publish("w", 0, ["h"]).records == 2

        def fail() -> None:
            with pair.client(**login) as client, pytest.raises(NotCoordinator):
                client.last_version("w")

        await asyncio.to_thread(use)
        pair.forwarding._wait_seconds = 0.3
        pair.location = f"grpc+tls://127.0.0.1:{port}"  # a name that the certificate does not have
        await asyncio.to_thread(fail)
        pair.forwarding._ca = test_tls.OTHER_CA.cert_pem.bytes()
        pair.location = f"grpc+tls://localhost:{port}"
        await asyncio.to_thread(fail)


async def test_calls_that_wait_for_a_paused_coordinator_are_repeated_when_another_one_is_elected() -> None:
    async with endpoints() as pair:
        host, _, port = pair.owner_endpoint.address.rpartition(":")
        async with FaultProxy(host, int(port)) as proxy:
            pair.location = f"grpc+tcp://{proxy.host}:{proxy.port}"

            def use(offset: int) -> None:
                with FlightClient(Servers.parse(pair.other_endpoint.address, timeout_seconds=10 * SECONDS)) as client:
                    client.ensure_topic("t")
                    client.commit("g", {"t": {0: offset}})

            await asyncio.to_thread(use, 0)
            proxy.hold_answers()
            seen = proxy.request_bytes
            waiting = asyncio.create_task(asyncio.to_thread(use, 1))
            await until(lambda: proxy.request_bytes > seen)
            assert not waiting.done()
            pair.location = ""
            await pair.other.take_over()
            await asyncio.to_thread(pair.forwarding.coordinator_changed)
            await waiting
            proxy.release_answers()
        assert pair.other.broker.committed(ADMIN, "g", "t", 0) == 1
