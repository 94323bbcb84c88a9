"""A Kafka cluster of child processes on free ports of 127.0.0.1. Every node is broker and controller.

The data is in the given directory and meant to be thrown away: `close` kills the nodes. `kill`, `pause`, `resume` and `start` of a node
are the faults of tests.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import random
import signal
import socket
import struct
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

from headrace.kafka_server import jars
from headrace.programs import last_line, started

READY_SECONDS_MAX: Final = 180.0
POLL_SECONDS: Final = 0.1
_PORTS: Final = range(10_000, 32_000)
"""Linux takes the ports of outgoing connections from 32768 on."""
JAVA_OPTIONS: Final = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Dorg.slf4j.simpleLogger.defaultLogLevel=error")
SETTINGS: Final = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "broker.session.timeout.ms": "6000",
    "broker.heartbeat.interval.ms": "1000",
    "controller.quorum.election.timeout.ms": "1000",
    "controller.quorum.fetch.timeout.ms": "2000",
    "log.cleaner.dedupe.buffer.size": "16777216",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.consumer.min.session.timeout.ms": "6000",
    "num.network.threads": "2",
    "num.io.threads": "4",
}
"""Settings for a small machine: small buffers, few internal partitions, failover within seconds."""

# Metadata, version 0, of all topics: api_key i16, api_version i16, correlation_id i32, client_id nullable string, topics array.
_METADATA = struct.pack(">hhihi", 3, 0, 1, -1, 0)
# DescribeQuorum, version 0, of partition 0 of the metadata topic, in Kafka's compact form: lengths are varints of the length plus one.
_QUORUM_TOPIC = b"__cluster_metadata"
_DESCRIBE_QUORUM = (
    struct.pack(">hhihB", 55, 0, 1, -1, 0) + bytes((2, 1 + len(_QUORUM_TOPIC))) + _QUORUM_TOPIC + bytes((2, 0, 0, 0, 0, 0, 0, 0))
)
# Before the leader id: correlation id, tags, error, topics, name, partitions, index, error.
_QUORUM_HEAD = struct.Struct(f">iBhB{1 + len(_QUORUM_TOPIC)}sBihi")


class KafkaFailed(Exception):
    """A node ended or did not become ready."""


class Node:
    """One Kafka process. `start` after `kill` continues with the same ports and data."""

    def __init__(self, number: int, folder: Path, ports: Sequence[int], command: Sequence[str]) -> None:
        self.number, self.folder = number, folder
        self.port, self.controller_port, self.secured_port = ports
        self.log = folder / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self._command = [*command, str(folder / "server.properties")]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def secured_address(self) -> str:
        """Address of the listener with TLS and SASL, if the cluster has one."""
        return f"127.0.0.1:{self.secured_port}"

    def start(self) -> None:
        """Start the process. `Cluster.wait` waits until it serves requests."""
        assert self.process is None or self.process.poll() is not None, "the node runs already"
        self.process = started(self._command, self.log)

    def kill(self) -> None:
        """End the process as a power cut would (SIGKILL)."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def pause(self) -> None:
        """Stop the process without ending it (SIGSTOP). When this returns, all its threads have stopped."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        """Continue a paused process (SIGCONT)."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def terminate(self, seconds: float = 60.0) -> None:
        """End the process in order."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(seconds)

    def known_brokers(self) -> int:
        """Return how many brokers this node reports; 0 while it does not answer."""
        reply = self._ask(_METADATA, 8)
        return int(struct.unpack_from(">i", reply, 4)[0]) if reply else 0

    def active_controller(self) -> int:
        """Return the number of the node that leads the controllers, as this node knows it; 0 while it does not answer."""
        reply = self._ask(_DESCRIBE_QUORUM, _QUORUM_HEAD.size)
        return int(_QUORUM_HEAD.unpack(reply)[-1]) if reply else 0

    def _ask(self, request: bytes, reply_bytes: int) -> bytes:
        """Send a request on a new connection and return the first bytes of the reply; empty if there is none."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=5.0) as connection:
                connection.sendall(struct.pack(">i", len(request)) + request)
                reply = b""
                while len(reply) < 4 + reply_bytes:
                    part = connection.recv(4 + reply_bytes - len(reply))
                    if not part:
                        return b""
                    reply += part
                return reply[4:]
        except OSError:
            return b""

    def failure(self) -> str | None:
        """Return why the process has ended, or None while it runs."""
        if self.process is None or self.process.poll() is None:
            return None
        return f"Kafka node {self.number} ended with {self.process.returncode}: {last_line(self.log)} (log: {self.log})"


class Cluster:
    """`count` nodes below `folder`; with three, a topic has three replicas and an acknowledgement needs two of them.

    With `secured`, each node has one more listener, for clients with TLS and SASL. Its settings (certificates, mechanisms, users) are given
    without the prefix `listener.name.secured.`
    """

    def __init__(
        self, folder: Path, count: int = 1, settings: Mapping[str, str] | None = None, *, secured: Mapping[str, str] | None = None
    ) -> None:
        libraries = jars.resolved(jars.KAFKA)
        command = _command(libraries, f"-XX:SharedArchiveFile={_class_archive(libraries)}", "-Xlog:disable")
        self.nodes = _nodes(folder, count, settings or {}, command, secured)

    @property
    def bootstrap(self) -> str:
        return ",".join(node.address for node in self.nodes)

    @property
    def secured_bootstrap(self) -> str:
        return ",".join(node.secured_address for node in self.nodes)

    def start(self) -> None:
        """Start all nodes and wait until each reports all of them."""
        try:
            for node in self.nodes:
                node.start()
            self.wait()
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        """Wait until every node serves requests and reports every other one."""
        _wait(self.nodes, READY_SECONDS_MAX)

    def controller(self) -> Node:
        """Return the active controller. Raises `KafkaFailed` if no node names one."""
        for node in self.nodes:
            number = node.active_controller() if node.failure() is None else 0
            if number > 0:
                return self.nodes[number - 1]
        raise KafkaFailed("no node names an active controller")

    def close(self) -> None:
        """Kill all nodes."""
        for node in self.nodes:
            node.kill()

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _wait(nodes: Sequence[Node], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for node in nodes:
        while node.known_brokers() < len(nodes):
            for each in nodes:
                reason = each.failure()
                if reason is not None:
                    raise KafkaFailed(reason)
            if time.monotonic() > deadline:
                raise KafkaFailed(f"Kafka node {node.number} was not ready after {seconds:.0f} s: {last_line(node.log)} (log: {node.log})")
            time.sleep(POLL_SECONDS)


def _nodes(
    folder: Path, count: int, settings: Mapping[str, str], command: Sequence[str], secured: Mapping[str, str] | None = None
) -> list[Node]:
    ports = free_ports(3 * count)
    nodes = [Node(1 + index, folder / f"kafka-{1 + index}", ports[3 * index : 3 * index + 3], command) for index in range(count)]
    voters = ",".join(f"{node.number}@127.0.0.1:{node.controller_port}" for node in nodes)
    cluster_id = _random_id()
    for node in nodes:
        logs = node.folder / "logs"
        logs.mkdir(parents=True)
        # Written here instead of by Kafka's storage tool, which would be one more start of Java for each node.
        _write(
            logs / "meta.properties",
            {"version": "1", "cluster.id": cluster_id, "node.id": str(node.number), "directory.id": _random_id()},
        )
        properties = _properties(node, voters, min(3, count))
        if secured is not None:
            _secure(properties, node, secured)
        _write(node.folder / "server.properties", {**properties, **settings})
    return nodes


def _properties(node: Node, voters: str, replicas: int) -> dict[str, str]:
    enough = str(min(2, replicas))
    return {
        **SETTINGS,
        "process.roles": "broker,controller",
        "node.id": str(node.number),
        "controller.quorum.voters": voters,
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://{node.address},CONTROLLER://127.0.0.1:{node.controller_port}",
        "advertised.listeners": f"PLAINTEXT://{node.address}",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "log.dirs": str(node.folder / "logs"),
        "default.replication.factor": str(replicas),
        "min.insync.replicas": enough,
        "offsets.topic.replication.factor": str(replicas),
        "transaction.state.log.replication.factor": str(replicas),
        "transaction.state.log.min.isr": enough,
        "share.coordinator.state.topic.replication.factor": str(replicas),
        "share.coordinator.state.topic.min.isr": enough,
    }


def _secure(properties: dict[str, str], node: Node, secured: Mapping[str, str]) -> None:
    """Add the listener with TLS and SASL."""
    for name in ("listeners", "advertised.listeners"):
        properties[name] += f",SECURED://{node.secured_address}"
    properties["listener.security.protocol.map"] += ",SECURED:SASL_SSL"
    properties.update({f"listener.name.secured.{name}": value for name, value in secured.items()})


def _write(path: Path, properties: Mapping[str, str]) -> None:
    path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()), encoding="utf-8")


def _random_id() -> str:
    # Kafka reads ids with a leading dash as options in its tools, so none begins with one.
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode().replace("-", "a")


def free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 on which nothing listens. The kernel does not give them to outgoing connections, so that they are still
    free when a program that starts slowly listens on them."""
    found: list[int] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(found) == count:
            break
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            found.append(port)
    return found


def _command(libraries: Path, *options: str) -> list[str]:
    # A sorted list instead of a wildcard: the class archive is valid only for the same order.
    path = os.pathsep.join(str(jar) for jar in sorted(libraries.glob("*.jar")))
    return [jars.java(), *JAVA_OPTIONS, *options, "-cp", path, "kafka.Kafka"]


def _class_archive(libraries: Path) -> Path:
    """Return an archive of Kafka's loaded classes (class data sharing), made once. It halves the CPU time of a start."""
    java = Path(jars.java()).resolve()
    key = hashlib.sha256(f"{java} {java.stat().st_mtime} {JAVA_OPTIONS}".encode()).hexdigest()[:12]
    archive = libraries / f"classes-{key}.jsa"
    with jars.alone(archive):
        if not archive.exists():
            made = archive.with_suffix(".new")
            made.unlink(missing_ok=True)
            with tempfile.TemporaryDirectory() as scratch:
                [node] = _nodes(Path(scratch), 1, {}, _command(libraries, f"-XX:ArchiveClassesAtExit={made}", "-Xlog:disable"))
                try:
                    node.start()
                    _wait([node], READY_SECONDS_MAX)
                    node.terminate()
                finally:
                    node.kill()
            if made.exists():
                made.rename(archive)
    return archive
