"""Resource exhaustion: after each resource is released, everything works without a restart."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest

from headrace.errors import BrokerError
from headrace.flight.client import FlightClient, Servers
from tests.crash.peer import Peer
from tests.crash.serving import SMALL
from tests.faults.harness import SECONDS_MAX, FaultyBroker, suffering, until
from tests.faults.injection import Fault, injected

pytestmark = pytest.mark.kill_loop

DESCRIPTORS: Final = 160
IDLE_PEERS: Final = 2 * DESCRIPTORS
MIB: Final = 1024 * 1024


@contextlib.contextmanager
def idle_peers(address: tuple[str, int], count: int) -> Iterator[None]:
    """Open idle connections. Those that the broker does not accept wait in its backlog, or are closed."""
    with contextlib.ExitStack() as peers:
        for _ in range(count):
            peer = peers.enter_context(socket.socket())
            peer.setblocking(False)
            peer.connect_ex(address)
        yield


@contextlib.contextmanager
def limited(pid: int, kind: int, soft: int) -> Iterator[None]:
    """Lower a limit of a running process during the block."""
    before = resource.prlimit(pid, kind)
    resource.prlimit(pid, kind, (soft, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, kind, before)


def is_served(address: tuple[str, int]) -> bool:
    try:
        with Peer(address, timeout=SECONDS_MAX) as peer:
            peer.ping()
    except ConnectionError:
        return False
    return True


def address_space_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def publish_under_pressure(subject: FaultyBroker, rounds: int) -> None:
    """Publish on existing connections until the broker returns an error or disconnects."""
    for client in subject.clients:
        with contextlib.suppress(ConnectionError), client.connect(subject.address) as peer:
            for _ in range(rounds):
                client.publish_on(peer)


def test_idle_peers_that_use_up_the_descriptors_cost_nobody_else_anything(tmp_path: Path) -> None:
    launcher = ["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}"]
    with suffering(tmp_path, launcher=launcher) as subject, contextlib.ExitStack() as connections:
        writers = [(client, connections.enter_context(client.connect(subject.address))) for client in subject.clients]
        for client, peer in writers:
            client.publish_on(peer)
        with idle_peers(subject.address, IDLE_PEERS):
            for _ in range(3):
                for client, peer in writers:
                    client.publish_on(peer)  # opens new segments and journal files, which takes descriptors
        connections.close()
        until(lambda: is_served(subject.address), "the places of peers that left are not given to others")
        subject.must_be_healthy()


def test_a_lowered_limit_of_descriptors_is_survived_and_left_again(tmp_path: Path) -> None:
    with suffering(tmp_path) as subject:
        subject.publish()
        used = len(list(Path(f"/proc/{subject.broker.pid}/fd").iterdir()))
        with contextlib.ExitStack() as connections:
            writers = [(client, connections.enter_context(client.connect(subject.address))) for client in subject.clients]
            for client, peer in writers:
                client.publish_on(peer, values=1)  # accepted before the limit falls
            with limited(subject.broker.pid, resource.RLIMIT_NOFILE, used + len(writers)):
                for client, peer in writers:
                    with contextlib.suppress(ConnectionError):
                        client.publish_on(peer)
        subject.must_be_healthy()


def test_a_machine_without_threads_is_survived_and_left_again(tmp_path: Path) -> None:
    with suffering(tmp_path) as subject:
        assert subject.inject(Fault("clone,clone3", "error=EAGAIN", "1+")) == "healthy"


def test_flight_calls_that_get_no_thread_are_refused_and_served_again(tmp_path: Path) -> None:
    settings = {**SMALL, "HEADRACE__LISTEN__FLIGHT": "127.0.0.1:0"}
    fault = Fault("clone,clone3", "error=EAGAIN")
    with suffering(tmp_path, settings=settings) as subject:
        endpoint = json.loads((tmp_path / "ready.json").read_text())["protocols"]["flight"][0]

        def topics(_: int = 0) -> bool:
            try:
                with FlightClient(Servers((endpoint,), timeout_seconds=30.0)) as client:
                    return client.topics() is not None
            except (BrokerError, pa.ArrowException):
                return False

        with injected(subject.broker.pid, tmp_path / "no-threads", fault), ThreadPoolExecutor(16) as pool:
            list(pool.map(topics, range(16)))
        assert subject.broker.process.poll() is None, subject.output()
        assert topics()


def test_a_broker_without_memory_refuses_and_lives_on(tmp_path: Path) -> None:
    with suffering(tmp_path) as subject:
        subject.publish()
        pid = subject.broker.pid
        for room in (8 * MIB, 1 * MIB):
            with limited(pid, resource.RLIMIT_AS, address_space_bytes(pid) + room):
                publish_under_pressure(subject, rounds=3)
            assert subject.broker.process.poll() is None, subject.output()
            subject.must_be_healthy()


def test_a_disk_without_room_for_anything_is_survived_and_left_again(tmp_path: Path) -> None:
    trace = tmp_path / "full"
    full = [Fault(call, "error=ENOSPC") for call in ("pwritev2", "fallocate", "mkdir", "rename")]
    with suffering(tmp_path) as subject:
        subject.publish()
        with injected(subject.broker.pid, trace, *full):
            for _ in range(3):
                assert subject.publish(), "a full disk takes nothing"
            subject.read_all()
            assert subject.state() == "full"
        subject.must_be_healthy()
