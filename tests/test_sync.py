"""`headrace.sync`: the same clients without an event loop."""

from __future__ import annotations

import inspect
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count

import pytest

import headrace
from headrace.clients.flymq.client import FlyMqOptions
from tests.protocols.peers import API_KEY, PEERS, WAIT_SECONDS, Broker, Peer, serving

NAMES = count()
peers = pytest.mark.parametrize("peer", PEERS, ids=str)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("sync")) as broker:
        yield broker


def test_the_module_can_be_imported_by_its_name() -> None:
    subprocess.run([sys.executable, "-c", "import headrace.sync; headrace.sync.connect"], check=True, timeout=WAIT_SECONDS)


def test_the_synchronous_client_has_every_method_of_the_asynchronous_one() -> None:
    futures = {"send", "send_many"}
    wanted = {name for name in vars(headrace.Client) if not name.startswith("_")} - futures
    assert wanted <= set(dir(headrace.SyncClient))
    for name in ("publish", "publish_many", "publish_with_ttl", "commit", "seek"):
        assert inspect.signature(getattr(headrace.SyncClient, name)) == inspect.signature(getattr(headrace.Client, name))


@pytest.mark.parametrize("protocol", ["flymq", "rustlog", "blipmq"])
def test_messages_settle_synchronously(broker: Broker, protocol: str) -> None:
    topic = f"settled-{next(NAMES)}"
    with headrace.sync.connect(f"flymq://{broker.address}") as admin:
        admin.create_topic(topic)
    api_key = API_KEY if protocol == "blipmq" else None
    with headrace.sync.connect(f"{protocol}://{broker.address}", api_key=api_key) as client:
        subscription = client.subscribe(topic) if protocol == "blipmq" else client.subscribe(topic, "earliest", group="g")
        client.publish_many(topic, [b"a", b"b", b"c"])
        assert next(subscription).ack() is True
        with next(subscription) as second:
            assert second.value == b"b"
        third = next(subscription)
        with pytest.raises(RuntimeError), third:
            raise RuntimeError("not handled")
        if protocol == "flymq":
            assert third.nack() is True
        else:
            with pytest.raises(headrace.NotSupported):
                third.nack()
        if protocol != "blipmq":
            assert client.committed(topic, group="g") == 2
            assert [(message.value, message.offset, message.topic) for message in client.fetch(topic, 2)] == [(b"c", 2, topic)]


def test_a_synchronous_transaction_commits_or_rolls_back(broker: Broker) -> None:
    topic = f"transaction-{next(NAMES)}"
    with headrace.sync.connect(f"flymq://{broker.address}") as client:
        client.create_topic(topic)
        with client.transaction() as transaction:
            transaction.publish(topic, b"a", key=b"k")
            transaction.commit_offset(topic, 1, group="g")
        with pytest.raises(RuntimeError), client.transaction() as transaction:
            transaction.publish(topic, b"b")
            raise RuntimeError("rolled back")
        assert [message.value for message in client.fetch(topic)] == [b"a"]
        assert client.committed(topic, group="g") == 1
    with headrace.sync.connect(f"rustlog://{broker.address}") as other, pytest.raises(headrace.NotSupported, match="fujin:// do"):
        other.transaction()


@peers
def test_the_synchronous_client_has_the_same_methods(broker: Broker, peer: Peer) -> None:
    topic, threads = f"sync-{next(NAMES)}", threading.active_count()
    with headrace.sync.connect(f"flymq://{broker.address}") as other:
        other.create_topic(topic)
        assert topic in other.topics()
    url, api_key = f"{peer.protocol}://{broker.address}", API_KEY if peer.needs_api_key else None
    with headrace.sync.connect(url, api_key=api_key) as client:
        subscription = client.subscribe(
            topic, "earliest" if peer.reads_history else "latest", settlement="auto" if peer.needs_settlement else "explicit"
        )
        assert subscription.next(timeout=0.05) is None
        assert client.publish(topic, b"a").topic == topic
        assert client.publish_many(topic, [b"b", b"c"]) == 2
        client.flush()
        client.ping()
        assert [next(subscription).value for _ in range(3)] == [b"a", b"b", b"c"]
        subscription.close()
        assert list(subscription) == []
        assert (client.is_connected, client.unacknowledged) == (True, 0)
    with pytest.raises(headrace.ClientClosed):
        client.publish(topic, b"late")
    client.close()
    assert client.abandon() == (0, 0)
    assert threading.active_count() == threads


def test_the_synchronous_client_settles_and_seeks(broker: Broker) -> None:
    topic = f"sync-{next(NAMES)}"
    with headrace.sync.connect(f"flymq://{broker.address}", options=FlyMqOptions(fetch_records_max=10)) as client:
        client.create_topic(topic, partitions=2)
        receipt = client.publish(topic, b"a", key=b"k", partition=1)
        assert (receipt.topic, receipt.partition, receipt.offset) == (topic, 1, 0)
        client.publish_many(topic, [b"b", b"c"], partition=1)
        subscription = client.subscribe(topic, "earliest", group="g")
        assert client.ack(next(subscription))
        assert client.committed(topic, group="g", partition=1) == 1
        with pytest.raises(headrace.NotSupported, match="moving one member of a group"):
            subscription.seek(2, partition=1)
        assert [next(subscription).value, next(subscription).value] == [b"b", b"c"]
        subscription.commit()
        assert client.committed(topic, group="g", partition=1) == 3
        client.commit(topic, 1, group="g", partition=1)
        assert [message.value for message in client.fetch(topic, group="g", partition=1)] == [b"b", b"c"]
        assert client.seek(topic, group="g", partition=1, offset=0) == 0
        assert client.offset_for_time(topic, 0, partition=1) == 0
        alone = client.subscribe(topic, "earliest", partition=1)
        assert next(alone).value == b"a"
        alone.seek(2, partition=1)
        assert next(alone).value == b"c"
        batches = client.subscribe(topic, "earliest", partition=1).batches()
        assert next(batches).values == [b"a", b"b", b"c"]
        assert client.nack(next(client.subscribe(topic, 0, group="h", partition=1))) is True
        client.delete_topic(topic)
        assert topic not in client.topics()


def test_a_failed_synchronous_connection_leaves_no_thread() -> None:
    threads = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(headrace.ConnectFailed):
        headrace.sync.connect(f"figg://127.0.0.1:{port}")
    assert threading.active_count() == threads
