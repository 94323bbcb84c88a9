"""Kafka nodes as child processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from headrace.kafka_server import Cluster, KafkaFailed

pytestmark = [pytest.mark.kafka, pytest.mark.xdist_group("kafka")]
DEADLINE_SECONDS = 120.0


def publish(cluster: Cluster, topic: str, values: list[bytes]) -> None:
    """Write the values with acks=all and fail if one is not acknowledged."""
    failed: list[object] = []
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "message.timeout.ms": 120_000})
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: failed.append(error) if error else None)
    assert producer.flush(DEADLINE_SECONDS) == 0 and failed == []


def create(cluster: Cluster, topic: str) -> AdminClient:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    admin.create_topics([NewTopic(topic, 1)])[topic].result(DEADLINE_SECONDS)
    return admin


def test_a_node_takes_records_and_is_gone_after_the_block(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        create(cluster, "orders")
        publish(cluster, "orders", [b"1", b"2"])
        [node] = cluster.nodes
    assert node.process is not None and node.process.returncode == -signal.SIGKILL


def test_three_nodes_go_on_without_the_leader_and_take_it_back(kafka_cluster: Cluster) -> None:
    admin = create(kafka_cluster, "replicated")
    publish(kafka_cluster, "replicated", [b"before"])
    leader = admin.list_topics("replicated", DEADLINE_SECONDS).topics["replicated"].partitions[0].leader
    node = kafka_cluster.nodes[leader - 1]
    node.kill()
    publish(kafka_cluster, "replicated", [b"without the leader"])
    node.start()
    kafka_cluster.wait()


def test_another_node_becomes_the_active_controller_when_it_is_killed(kafka_cluster: Cluster) -> None:
    before = kafka_cluster.controller()
    assert {node.active_controller() for node in kafka_cluster.nodes} == {before.number}
    before.kill()
    deadline = time.monotonic() + DEADLINE_SECONDS
    others = [node for node in kafka_cluster.nodes if node is not before]
    while {node.active_controller() for node in others} & {before.number, 0, -1}:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    before.start()
    kafka_cluster.wait()


def test_a_failed_start_names_the_node_and_its_log(tmp_path: Path) -> None:
    with pytest.raises(KafkaFailed, match=r"Kafka node 1 ended with 1: .*kafka-1/log"):
        Cluster(tmp_path, settings={"num.io.threads": "none"}).start()


def test_the_command_prints_the_address_and_stops_at_ctrl_c(tmp_path: Path) -> None:
    command = subprocess.Popen(
        [sys.executable, "-m", "headrace.kafka_server"], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert command.stdout is not None
    with command.stdout:
        assert command.stdout.readline().startswith("127.0.0.1:")
        command.send_signal(signal.SIGINT)
        assert command.wait(DEADLINE_SECONDS) == 0
    assert list(tmp_path.iterdir()) == []
