"""Two brokers on one Kafka whose listeners use TLS: what the other broker passes on to the coordinator is encrypted and verified too."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa

import headrace
from headrace.flight.client import FlightClient, Servers
from headrace.kafka_server import Cluster
from tests.protocols.peers import WAIT_SECONDS
from tests.server.process import BrokerProcess
from tests.server.test_tls_serving import certs, tls

ROWS = pa.RecordBatch.from_pydict({"value": pa.array([b"1", b"2"], pa.binary())})


def port(broker: BrokerProcess, kind: str) -> int:
    protocols = broker.ready["protocols"]
    assert isinstance(protocols, dict)
    return int(str(protocols[kind][0]).rpartition(":")[2])


async def test_requests_for_the_coordinator_reach_it_through_the_other_broker_with_tls(kafka: Cluster, tmp_path: Path) -> None:
    files = certs(tmp_path / "certs")
    ca, engine = str(files / "ca.pem"), [f"kafka.bootstrap={kafka.bootstrap}", "kafka.prefix=encrypted.", "kafka.advertise=localhost"]
    chosen = [word for one in engine for word in ("--set", one)] + tls(files, f"tls.ca={ca}")
    listen = ("--listen-flight", "127.0.0.1:0", "--listen-quic", "127.0.0.1:0")
    with ExitStack() as stack:
        started = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            broker = BrokerProcess(tmp_path / name, "--engine", "kafka", *chosen, *listen, log=tmp_path / f"{name}.log")
            started.append(stack.enter_context(broker))
        other = started[1]

        def through_flight() -> None:
            with FlightClient(Servers.parse(f"localhost:{port(other, 'flight')}", tls=True, ca_file=ca)) as client:
                server = client.status().server
                assert server is not None and not server.is_coordinator
                assert client.stage("h", [ROWS], topic="t", writer="w").records == 2
                assert client.publish("w", 0, ["h"]).records == 2

        async with (
            asyncio.timeout(WAIT_SECONDS),
            headrace.connect(f"flymq+tls://localhost:{port(other, 'tcp')}", ca_file=ca) as flymq,
            headrace.connect(f"fujin+tls://localhost:{port(other, 'quic')}", ca_file=ca) as fujin,
        ):
            await flymq.create_topic("t")
            await flymq.commit("t", 0, group="g")
            await asyncio.to_thread(through_flight)
            async with fujin.transaction() as transaction:
                await transaction.publish("t", b"3")
            assert [message.value for message in await flymq.fetch("t")] == [b"1", b"2", b"3"]
