"""`headrace capacity`: arithmetic from cost per record to machines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.cli.capacity import Costs, demands, plan
from tests.cli.shell import headrace


def plans(*arguments: str) -> list[dict[str, Any]]:
    done = headrace("capacity", "-o", "json", *arguments)
    assert done.code == 0, done.err
    found: list[dict[str, Any]] = json.loads(done.out)["plans"]
    return found


def test_three_rates_are_planned_unless_others_are_given() -> None:
    assert [one["records_per_s"] for one in plans()] == [1e4, 1e6, 1e8]
    assert [one["records_per_s"] for one in plans("--rate", "50k", "--rate", "2_000")] == [5e4, 2e3]


def test_the_smallest_plan_is_one_broker_and_a_node_for_each_replica() -> None:
    [one] = plans("--rate", "1")
    assert (one["brokers"], one["kafka_nodes"], one["executors"], one["bottleneck"]) == (1, 3, 1, "none")


def test_units_are_demand_over_usable_capacity() -> None:
    costs = Costs(broker_publish_us=2, readers=1, broker_read_us=1, spark_readers=0, broker_cores=1, utilisation=0.5)
    by_name = {each.resource: each for each in demands(1e6, costs)}
    assert by_name["broker CPU"].units == pytest.approx(1e6 * (2 + 1) / (1 * 0.5 * 1e6))
    # One write to each of three replicas of 110 bytes, 400 MB/s disks half used.
    assert by_name["Kafka disk rate"].units == pytest.approx(1e6 * 3 * 110 / 200e6)
    assert by_name["Spark CPU"].units == 0
    assert plan(1e6, costs)["brokers"] == 6


def test_all_machines_grow_with_the_rate() -> None:
    small, large = plans("--rate", "1M", "--rate", "100M")
    for name in ("brokers", "kafka_nodes", "partitions", "executors", "gbit_per_s", "stored_tb"):
        assert large[name] > 50 * small[name]


@pytest.mark.parametrize(
    ("setting", "bottleneck"),
    [
        ("broker_publish_us=50", "broker CPU"),
        ("kafka_leader_us=500", "Kafka CPU"),
        ("kafka_disk_mb=1", "Kafka disk rate"),
        ("retention_hours=10000", "Kafka disk size"),
        ("spark_us=1000", "Spark CPU"),
        ("network_gbit=0.01", "Kafka network"),
    ],
)
def test_the_bottleneck_is_the_resource_that_needs_the_most_machines(setting: str, bottleneck: str) -> None:
    quiet = ["--set", "readers=0", "--set", "spark_readers=1", "--set", "protocol_bytes=1"]
    [one] = plans("--rate", "1M", *quiet, "--set", setting)
    assert one["bottleneck"] == bottleneck


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--set", "colour=1"], "'colour' is unknown; expected one of value_bytes"),
        (["--set", "value_bytes=many"], "value_bytes: expected a positive number, got 'many'"),
        (["--set", "replicas=0"], "replicas: expected a positive number"),
        (["--rate", "fast"], "'fast' is not a rate"),
        (["--rate", "-1"], "is not a rate"),
    ],
)
def test_a_wrong_number_is_named(arguments: list[str], complaint: str) -> None:
    done = headrace("capacity", *arguments)
    assert done.code == 2 and complaint in done.err


def test_the_table_ends_with_a_remedy_for_each_rate_and_costs_lists_all_numbers() -> None:
    lines = headrace("capacity").out.decode().splitlines()
    assert lines[-1].startswith("100,000,000/s: ") and len(lines) >= 7
    listed = {row["name"]: row["value"] for row in json.loads(headrace("capacity", "--costs", "--set", "readers=3", "-o", "json").out)}
    assert listed["readers"] == 3 and listed["value_bytes"] == 100
