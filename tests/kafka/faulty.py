"""Two brokers on three Kafka nodes, faults by chance, and the verification of all records at the end.

An acknowledged value must be in the log once, no value may be there twice, a refused one not at all, and the values of a partition must be
in the order in which they were sent. Every group must have got and settled each acknowledged value.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from confluent_kafka import Consumer, TopicPartition

from headrace.kafka_server import Cluster, Node
from headrace.kafka_server.cluster import free_ports
from tests.kafka.loads import RECOVERY_SECONDS_MAX, Ledger
from tests.server.process import BrokerProcess

FAULTS: Final = (
    *("kill leader", "pause leader", "kill controller", "pause controller"),
    *("kill coordinator", "pause coordinator", "kill other", "pause other"),
)
"""The leader and the controller are Kafka nodes; the coordinator and the other one are brokers."""
_HTTP_SECONDS: Final = 10.0


def drawn(chance: random.Random) -> Iterator[str]:
    """Yield faults by chance, each of them once before any comes again."""
    while True:
        yield from chance.sample(FAULTS, len(FAULTS))


class Subject:
    """Two brokers on one cluster that both serve, and the faults that can happen to them."""

    def __init__(self, cluster: Cluster, folder: Path, topic: str) -> None:
        self.cluster, self.topic, self._folder = cluster, topic, folder
        places = [f"127.0.0.1:{port}" for port in free_ports(6)]
        self.tcp, self.flight, self._http = places[:2], places[2:4], places[4:]
        self._brokers = [self._started(number) for number in range(2)]
        self.failovers = 0
        """Times that another process was the coordinator."""
        self._last: tuple[int, int] | None = None
        self._relayed: Counter[tuple[int, int]] = Counter()
        """Connections that a process has handed over to the coordinator, as last seen."""

    def _started(self, number: int) -> BrokerProcess:
        folder = self._folder / f"broker-{number}"
        folder.mkdir(exist_ok=True)
        engine = ("--engine", "kafka", "--set", f"kafka.bootstrap={self.cluster.bootstrap}", "--set", "kafka.prefix=faults.")
        listen = ("--listen", self.tcp[number], "--listen-flight", self.flight[number], "--listen-http", self._http[number])
        return BrokerProcess(folder, *engine, *listen, log=folder / "log")

    def close(self) -> None:
        for broker in self._brokers:
            broker.process.kill()
            broker.process.communicate()

    async def serving(self) -> None:
        """Wait until both brokers serve."""
        for broker in self._brokers:
            await asyncio.to_thread(broker.wait_ready)

    async def coordinator(self) -> int:
        """Wait until a broker is the coordinator and return its number."""
        async with asyncio.timeout(RECOVERY_SECONDS_MAX):
            while True:
                for number in range(2):
                    with contextlib.suppress(OSError, KeyError):
                        if await asyncio.to_thread(self._look, number):
                            return number
                await asyncio.sleep(0.1)

    @property
    def relayed(self) -> int:
        """Connections handed over to the coordinator. What a process did after the last look and before it was killed is missing."""
        return self._relayed.total()

    def _look(self, number: int) -> bool:
        """Return whether a broker is the coordinator. Raises `OSError` if it does not answer."""
        server: dict[str, Any] = json.loads(self._read(number, "status.json"))["server"]
        place = number, int(server["pid"])
        for line in self._read(number, "metrics").decode().splitlines():
            if line.startswith("headrace_connections_relayed_total "):
                self._relayed[place] = max(self._relayed[place], int(float(line.split()[1])))
        if server["is_coordinator"] and place != self._last:
            self.failovers += self._last is not None
            self._last = place
        return bool(server["is_coordinator"])

    def _read(self, number: int, path: str) -> bytes:
        with urllib.request.urlopen(f"http://{self._http[number]}/{path}", timeout=_HTTP_SECONDS) as answer:
            return bytes(answer.read())

    def leader(self) -> Node:
        """Return the node that leads partition 0 of the topic."""
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.cluster.bootstrap, "log_level": 0})
        number = admin.list_topics(f"faults.{self.topic}", 60.0).topics[f"faults.{self.topic}"].partitions[0].leader
        return self.cluster.nodes[max(number, 1) - 1]

    async def _fail_node(self, what: str, node: Node, chance: random.Random) -> None:
        if what == "kill":
            node.kill()
            await asyncio.sleep(chance.uniform(0.0, 5.0))
            node.start()
        else:
            node.pause()
            await asyncio.sleep(chance.uniform(0.5, 9.0))
            node.resume()
        await asyncio.to_thread(self.cluster.wait)

    async def _fail_broker(self, what: str, number: int, chance: random.Random) -> None:
        """Kill a broker and start it again, or pause it, at times so long that the other takes over from it and it has to notice."""
        process = self._brokers[number].process
        if what == "kill":
            process.kill()
            process.communicate()
            await asyncio.sleep(chance.uniform(0.0, 8.0))
            self._brokers[number] = self._started(number)
        else:
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(chance.uniform(0.5, 15.0))
            process.send_signal(signal.SIGCONT)

    async def fault(self, name: str, chance: random.Random) -> None:
        """Let one fault happen and end."""
        what, which = name.split()
        if which in ("coordinator", "other"):
            coordinator = await self.coordinator()
            await self._fail_broker(what, coordinator if which == "coordinator" else 1 - coordinator, chance)
        else:
            await self._fail_node(what, await asyncio.to_thread(self.leader if which == "leader" else self.cluster.controller), chance)


def stored(cluster: Cluster, topic: str, partitions: int) -> list[list[int]]:
    """Return the committed values of each partition, read by Kafka's own client."""
    settings = {"bootstrap.servers": cluster.bootstrap, "group.id": "verification", "isolation.level": "read_committed", "log_level": 0}
    consumer = Consumer({**settings, "enable.auto.commit": False, "enable.partition.eof": True})
    found = []
    for partition in range(partitions):
        consumer.assign([TopicPartition(topic, partition, 0)])
        values: list[int] = []
        while (message := consumer.poll(60.0)) is not None:
            if message.error() is not None:
                break  # the end of the partition
            values.append(int(message.value() or b""))
        found.append(values)
    consumer.close()
    return found


@dataclass
class Verdict:
    """Counts over all partitions. Only `acknowledged` and `unknown` may be above 0."""

    acknowledged: int = 0
    unknown: int = 0
    lost: int = 0
    doubled: int = 0
    reordered: int = 0
    refused_but_stored: int = 0
    undelivered: int = 0
    unsettled: int = 0


def judge(ledgers: Sequence[Ledger], found: Sequence[Sequence[int]], *, undelivered: int = 0, unsettled: int = 0) -> Verdict:
    """Compare the ledgers with the log."""
    verdict = Verdict(undelivered=undelivered, unsettled=unsettled)
    for ledger, values in zip(ledgers, found, strict=True):
        counted = Counter(values)
        verdict.acknowledged += len(ledger.acknowledged)
        verdict.unknown += len(ledger.unknown)
        verdict.lost += sum(number not in counted for number in ledger.acknowledged)
        verdict.doubled += sum(times - 1 for times in counted.values())
        # A broker that was paused may still write what a client has given up as unknown before it went on at the other broker.
        ordered = [number for number in values if number not in ledger.unknown] if ledger.may_be_late else values
        verdict.reordered += sum(after < before for before, after in pairwise(ordered))
        verdict.refused_but_stored += sum(number in counted for number in ledger.refused)
    return verdict
