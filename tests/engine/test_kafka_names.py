"""Names and settings of topics, in our terms and in Kafka's."""

from __future__ import annotations

import pytest

from headrace.engine.contract import Cleanup, TopicConfig
from headrace.engine.kafka.names import Names, from_kafka_config, to_kafka_config, weakness
from headrace.errors import InvalidTopicName


@pytest.mark.parametrize("prefix", ["", "team.a-"])
@pytest.mark.parametrize("name", ["orders", "a.b_c-d", "__users", "__stage.7"])
def test_a_name_comes_back_from_kafka(prefix: str, name: str) -> None:
    names = Names(prefix)
    assert names.from_kafka(names.to_kafka(name)) == name


@pytest.mark.parametrize("theirs", ["__consumer_offsets", "__transaction_state", "other-orders", "team-"])
def test_topics_of_others_are_not_served(theirs: str) -> None:
    assert Names("team-").from_kafka(theirs) is None


def test_kafkas_own_topics_are_not_served_without_a_prefix() -> None:
    assert Names("").from_kafka("__consumer_offsets") is None
    assert Names("").from_kafka("orders") == "orders"


@pytest.mark.parametrize("name", ["größe", "a b", "x" * 250, "a/b", ".."])
def test_a_name_that_kafka_does_not_allow_is_refused(name: str) -> None:
    with pytest.raises(InvalidTopicName):
        Names("").to_kafka(name)


@pytest.mark.parametrize(
    "config",
    [
        TopicConfig(),
        TopicConfig(
            cleanup=Cleanup.COMPACT, retention_ms=5, retention_bytes=6, segment_bytes=1 << 21, tombstone_retention_ms=7, compress=True
        ),
    ],
)
def test_settings_come_back_from_kafka(config: TopicConfig) -> None:
    assert from_kafka_config(to_kafka_config(config)) == config


@pytest.mark.parametrize(
    ("settings", "replicas", "named"),
    [
        ({"min.insync.replicas": "1"}, 3, "min.insync.replicas"),
        ({"unclean.leader.election.enable": "true", "min.insync.replicas": "2"}, 3, "unclean.leader.election.enable"),
    ],
)
def test_a_setting_that_may_lose_acknowledged_records_is_named(settings: dict[str, str], replicas: int, named: str) -> None:
    assert (weakness(settings, replicas) or "").startswith(named)


@pytest.mark.parametrize(("insync", "replicas"), [("1", 1), ("2", 3)])
def test_a_sound_policy_has_no_weakness(insync: str, replicas: int) -> None:
    assert weakness({"min.insync.replicas": insync, "unclean.leader.election.enable": "false"}, replicas) is None
