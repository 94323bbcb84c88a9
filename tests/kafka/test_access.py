"""Access control on Kafka: logins, denials, API keys over two protocols; a restarted broker knows all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import headrace
from headrace.clients.blipmq.client import BlipMqClient, BlipMqOptions
from headrace.clients.errors import LoginRefused
from headrace.clients.flymq.client import FlyMqClient, FlyMqOptions
from headrace.errors import NotAuthorized
from headrace.kafka_server import Cluster
from tests.canaries import secret
from tests.server.process import BrokerProcess
from tests.server.test_access import PASSWORD, enforced, log_in


def started(directory: Path, kafka: Cluster) -> BrokerProcess:
    engine = ("--engine", "kafka", "--set", f"kafka.bootstrap={kafka.bootstrap}", "--set", "kafka.prefix=access-")
    return enforced(directory, *engine)


async def test_logins_denials_and_keys_hold_on_kafka_and_after_a_restart(kafka: Cluster, tmp_path: Path) -> None:
    with started(tmp_path, kafka) as broker:
        address = broker.addresses[0]
        async with await log_in(broker) as root:
            await root.create_topic("t")
            await root.create_user("ann", PASSWORD, ["consumer"])
            await root.create_user("lorry", "", ["producer"])
            key = (await root.manage("key.create", owner="lorry"))["key"]
            with pytest.raises(LoginRefused, match="invalid username or password"):
                await log_in(broker, password=secret("wrong-password"))
            async with await FlyMqClient.connect(*address) as anonymous:
                with pytest.raises(NotAuthorized, match="anonymous may not publish"):
                    await anonymous.publish("t", b"by anonymous")
            async with await BlipMqClient.connect(*address, options=BlipMqOptions(api_key=key)) as blipmq:
                await blipmq.publish("t", b"by key")
            await root.manage("rule.add", subject="user:ann", effect="deny", actions=["read"], kind="topic", name="t")
        assert broker.stop()[0] == 0
    with started(tmp_path, kafka) as broker:
        address = broker.addresses[0]
        async with await log_in(broker, "ann") as ann:
            with pytest.raises(NotAuthorized):
                await ann.publish("t", b"by a consumer")
            with pytest.raises(NotAuthorized):
                await ann.fetch("t")
        async with await log_in(broker) as root:
            await root.manage("rule.remove", subject="user:ann", effect="deny", actions=["read"], kind="topic", name="t")
        async with headrace.connect("flymq://{}:{}".format(*address), api_key=key) as by_key:
            await by_key.publish("t", b"by key too")
        options = FlyMqOptions(user="ann", password=PASSWORD, connect_seconds=60.0)
        async with await FlyMqClient.connect(*address, options) as ann:
            assert [message.value for message in await ann.fetch("t")] == [b"by key", b"by key too"]
        assert broker.stop()[0] == 0
