"""Counters of records for many topics."""

from __future__ import annotations

from headrace.broker.meters import Meters


def test_records_that_land_together_are_one_batch_of_each_topic() -> None:
    meters = Meters(lambda: 0.0)
    for _ in range(2):
        meters.published_each(["a", "b", "a", "c"], [1, 2, 4, 8], "flymq", {3}, 0.25)
    found = {topic: meters.topics[topic]["flymq"] for topic in meters.topics}
    assert {topic: (meter.published_records, meter.published_bytes, meter.published_batches) for topic, meter in found.items()} == {
        "a": (4, 10, 2),
        "b": (2, 4, 2),
    }
    assert found["a"].publish_seconds == 0.5
    assert (meters.publish_durations["flymq"].count, meters.publish_durations["flymq"].total) == (4, 1.0)


def test_records_that_all_failed_count_nothing() -> None:
    meters = Meters(lambda: 0.0)
    meters.published_each(["a"], [1], "flymq", {0}, 0.25)
    assert (meters.topics, meters.publish_durations) == ({}, {})


def test_a_topic_that_is_created_again_counts_from_zero_and_the_totals_go_on() -> None:
    meters = Meters(lambda: 0.0)
    for _ in range(2):
        meters.published_each(["a", "b"], [1, 2], "flymq", (), 0.25)
        meters.topic_gone("a")
    meters.published_each(["a"], [1], "flymq", (), 0.25)
    assert meters.topics["a"]["flymq"].published_records == 1
    assert meters.by_protocol(lambda topic: True, with_gone=True)["flymq"].published_records == 5
