"""Two brokers on three Kafka nodes, a load with a ledger, faults by chance, and the verification of all records at the end.

Each value is sent once: after an unknown outcome the load goes on with the next value. An acknowledged value must be in the log once, no
value may be there twice, a refused one not at all, and the values of a partition must be in the order in which they were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, TopicPartition

import headrace
from headrace.clients.errors import NotSent, OutcomeUnknown
from headrace.errors import HeadraceError
from headrace.kafka_server import Cluster, Node
from headrace.kafka_server.cluster import free_ports
from tests.server.process import BrokerProcess

PARTITIONS: Final = 3
BATCH: Final = 20
PUBLISH_SECONDS: Final = 20.0
RECOVERY_SECONDS_MAX: Final = 180.0
UNKNOWN_KINDS: Final = frozenset(("outcome_unknown", "unknown_outcome"))


@dataclass
class Ledger:
    """Outcomes of the values of one partition, in the order in which they were sent."""

    acknowledged: list[int] = field(default_factory=list)
    refused: set[int] = field(default_factory=set)
    unknown: set[int] = field(default_factory=set)


class Load:
    """Publishes numbered values to each partition, one batch at a time, until it is stopped."""

    def __init__(self, topic: str, url: str) -> None:
        self.ledgers = [Ledger() for _ in range(PARTITIONS)]
        self._topic, self._url = topic, url
        self._is_stopped = False
        self._progress = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._publish(partition)) for partition in range(PARTITIONS)]

    async def stop(self) -> None:
        self._is_stopped = True
        _, pending = await asyncio.wait(self._tasks, timeout=RECOVERY_SECONDS_MAX)
        for task in pending:
            task.cancel()
        assert not pending, "no broker answers"
        await asyncio.gather(*self._tasks)

    async def progressed(self) -> None:
        """Wait until a value that is sent from now on is acknowledged in each partition."""
        before = [len(ledger.acknowledged) for ledger in self.ledgers]
        # A batch that is under way may have been written before the call, so two have to arrive.
        wanted = [count + 2 * BATCH for count in before]
        async with asyncio.timeout(RECOVERY_SECONDS_MAX), self._progress:
            await self._progress.wait_for(
                lambda: (
                    all(task.done() for task in self._tasks)
                    or all(len(ledger.acknowledged) >= count for ledger, count in zip(self.ledgers, wanted, strict=True))
                )
            )

    async def _publish(self, partition: int) -> None:
        ledger, number = self.ledgers[partition], 0
        async with headrace.connect(self._url, resend_writes=False, publish_seconds=PUBLISH_SECONDS, refused_connections_max=0) as client:
            while not self._is_stopped:
                numbers = range(number, number + BATCH)
                number += BATCH
                values = [b"%d" % one for one in numbers]
                futures = [await client.send(self._topic, value, partition=partition) for value in values]
                outcomes = await asyncio.gather(*futures, return_exceptions=True)
                for one, outcome in zip(numbers, outcomes, strict=True):
                    self._note(ledger, one, outcome)
                if any(isinstance(outcome, BaseException) for outcome in outcomes):
                    await asyncio.sleep(0.05)
                async with self._progress:
                    self._progress.notify_all()

    def _note(self, ledger: Ledger, number: int, outcome: object) -> None:
        if isinstance(outcome, headrace.Receipt):
            ledger.acknowledged.append(number)
        elif isinstance(outcome, OutcomeUnknown) or (isinstance(outcome, HeadraceError) and _kind(outcome) in UNKNOWN_KINDS):
            ledger.unknown.add(number)
        elif isinstance(outcome, NotSent | HeadraceError):
            ledger.refused.add(number)
        else:
            raise AssertionError(outcome)


def _kind(error: HeadraceError) -> str:
    return str(getattr(error, "kind", "") or getattr(error, "code", ""))


class Subject:
    """Two brokers on one cluster that both serve, and the faults that can happen to them."""

    def __init__(self, cluster: Cluster, folder: Path, topic: str) -> None:
        self.cluster, self.topic, self._folder = cluster, topic, folder
        self._ports = free_ports(2)
        self._brokers = [self._started(number) for number in range(2)]

    @property
    def url(self) -> str:
        return f"flymq://{','.join(f'127.0.0.1:{port}' for port in self._ports)}"

    def _started(self, number: int) -> BrokerProcess:
        folder = self._folder / f"broker-{number}"
        folder.mkdir(exist_ok=True)
        engine = ["--engine", "kafka", "--set", f"kafka.bootstrap={self.cluster.bootstrap}", "--set", "kafka.prefix=faults."]
        return BrokerProcess(folder, *engine, "--listen", f"127.0.0.1:{self._ports[number]}", log=folder / "log")

    def close(self) -> None:
        for broker in self._brokers:
            broker.process.kill()
            broker.process.communicate()

    async def serving(self) -> int:
        """Wait until a broker accepts connections and return its number: the coordinator, or the other one."""
        async with asyncio.timeout(RECOVERY_SECONDS_MAX):
            while True:
                for number, port in enumerate(self._ports):
                    with contextlib.suppress(OSError):
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.close()
                        return number
                await asyncio.sleep(0.1)

    def leader(self) -> Node:
        """Return the node that leads partition 0 of the topic."""
        from confluent_kafka.admin import AdminClient

        admin = AdminClient({"bootstrap.servers": self.cluster.bootstrap, "log_level": 0})
        number = admin.list_topics(f"faults.{self.topic}", 60.0).topics[f"faults.{self.topic}"].partitions[0].leader
        return self.cluster.nodes[max(number, 1) - 1]

    async def kill_node(self, node: Node, chance: random.Random) -> None:
        node.kill()
        await asyncio.sleep(chance.uniform(0.0, 5.0))
        node.start()
        await asyncio.to_thread(self.cluster.wait)

    async def pause_node(self, node: Node, chance: random.Random) -> None:
        node.pause()
        await asyncio.sleep(chance.uniform(0.5, 9.0))
        node.resume()
        await asyncio.to_thread(self.cluster.wait)

    async def kill_broker(self) -> None:
        """Kill a broker. The other serves, as the coordinator if that was killed; the killed one starts again."""
        number = await self.serving()
        self._brokers[number].process.kill()
        self._brokers[number].process.communicate()
        assert await self.serving() != number
        self._brokers[number] = self._started(number)

    async def pause_broker(self, chance: random.Random) -> None:
        """Pause a broker, at times so long that the other takes over from it. The paused one must notice it."""
        process = self._brokers[await self.serving()].process
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(chance.uniform(0.5, 20.0))
        process.send_signal(signal.SIGCONT)

    async def fault(self, chance: random.Random) -> str:
        """Let one fault happen and end. Returns its name."""
        name = chance.choice(FAULTS)
        if name == "kill broker":
            await self.kill_broker()
        elif name == "pause broker":
            await self.pause_broker(chance)
        else:
            what, which = name.split()
            node = await asyncio.to_thread(self.leader if which == "leader" else self.cluster.controller)
            await (self.kill_node if what == "kill" else self.pause_node)(node, chance)
        return name


FAULTS: Final = ("kill leader", "pause leader", "kill controller", "pause controller", "kill broker", "pause broker")


def stored(cluster: Cluster, topic: str) -> list[list[int]]:
    """Return the committed values of each partition, read by Kafka's own client."""
    settings = {"bootstrap.servers": cluster.bootstrap, "group.id": "verification", "isolation.level": "read_committed", "log_level": 0}
    consumer = Consumer({**settings, "enable.auto.commit": False, "enable.partition.eof": True})
    found = []
    for partition in range(PARTITIONS):
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


def judge(ledgers: list[Ledger], found: list[list[int]]) -> Verdict:
    """Compare the ledgers with the log."""
    verdict = Verdict()
    for ledger, values in zip(ledgers, found, strict=True):
        counted = Counter(values)
        verdict.acknowledged += len(ledger.acknowledged)
        verdict.unknown += len(ledger.unknown)
        verdict.lost += sum(number not in counted for number in ledger.acknowledged)
        verdict.doubled += sum(times - 1 for times in counted.values())
        verdict.reordered += sum(after < before for before, after in pairwise(values))
        verdict.refused_but_stored += sum(number in counted for number in ledger.refused)
    return verdict
