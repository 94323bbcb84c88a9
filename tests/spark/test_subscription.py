"""Topics of a query, and errors for missing topics."""

from __future__ import annotations

from typing import cast

import pytest

from headrace.errors import ConfigError
from headrace.flight.client import FlightClient
from headrace.limits import GROUP_NAME_BYTES_MAX
from headrace.spark.options import Options
from headrace.spark.subscription import Subscription
from tests.spark.fakes import FakeClient, state


def subscription(**options: str) -> Subscription:
    return Subscription.of(Options(options))


def client(*names: str) -> FlightClient:
    return cast(FlightClient, FakeClient({name: state(name, 5, 7) for name in names}))


def test_topics_are_separated_by_commas() -> None:
    assert subscription(subscribe=" b, a,,a ").names == ("a", "b")


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "none"),
        ({"subscribe": "a", "assign": '{"a":[0]}'}, "subscribe and assign"),
        ({"subscribe": "a", "subscribePattern": "a"}, "subscribe and subscribePattern"),
    ],
)
def test_exactly_one_way_of_saying_what_to_read(options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=f"exactly one of the options subscribe, subscribePattern and assign; got {message}"):
        subscription(**options)


def test_a_subscription_to_nothing_is_rejected() -> None:
    with pytest.raises(ConfigError, match="names no topic"):
        subscription(subscribe=" , ")


def test_a_pattern_matches_whole_names() -> None:
    pattern = subscription(subscribePattern="orders.*|x")
    assert list(pattern.states(client("orders", "orders.eu", "xx", "my-orders", "x"))) == ["orders", "orders.eu", "x"]


def test_a_pattern_means_dead_letters_only_if_it_says_so() -> None:
    there = client("orders", "orders.dlq", "orders.eu")
    assert list(subscription(subscribePattern="orders.*").states(there)) == ["orders", "orders.eu"]
    assert list(subscription(subscribePattern=r".*\.dlq").states(there)) == ["orders.dlq"]


def test_a_pattern_that_matches_nothing_yet_is_fine() -> None:
    assert subscription(subscribePattern="nothing").states(client("orders")) == {}


def test_a_broken_pattern_is_rejected() -> None:
    with pytest.raises(ConfigError, match='subscribePattern: "\\(" is not a regular expression'):
        subscription(subscribePattern="(")


def test_an_unknown_topic_is_rejected_with_names_like_it() -> None:
    with pytest.raises(ConfigError, match=r"there is no topic ordres; did you mean orders or orders.eu\?"):
        subscription(subscribe="ordres").states(client("orders", "orders.eu", "payments"))


def test_an_unknown_topic_like_no_other_is_rejected_with_some_that_exist() -> None:
    with pytest.raises(ConfigError, match="there is no topic zzz; there are a1, b2, c3, d4, e5 and others"):
        subscription(subscribe="zzz").states(client("f6", "e5", "d4", "c3", "b2", "a1"))
    with pytest.raises(ConfigError, match="there is no topic zzz; the broker has none"):
        subscription(subscribe="zzz").states(client())


def test_assigned_partitions_alone_are_read() -> None:
    assigned = subscription(assign='{"a":[1]}')
    states = assigned.states(client("a"))
    assert assigned.ends(states) == {("a", 1): 7}
    assert assigned.firsts(states) == {("a", 1): 0}


def test_an_assigned_partition_that_is_not_there_is_rejected() -> None:
    with pytest.raises(ConfigError, match="option assign: topic a has partitions 0 to 1, but not 2"):
        subscription(assign='{"a":[0,2]}').states(client("a"))


def test_the_group_is_named_after_what_is_read() -> None:
    assert subscription(subscribe="orders").group("spark-headrace") == "spark-headrace-orders"
    assert subscription(subscribe="b,a").group("p") == "p-a,b"
    assert subscription(assign='{"orders":[1]}').group("p") == "p-orders"
    assert subscription(subscribePattern="orders.*").group("p") == "p-orders.*"


def test_a_group_name_that_would_be_too_long_or_unreadable_is_a_digest_that_stays_the_same() -> None:
    long = subscription(subscribe=",".join(f"topic-{index}" for index in range(100)))
    assert long.group("p") == long.group("p") and len(long.group("p").encode()) < GROUP_NAME_BYTES_MAX
    assert " " not in subscription(subscribePattern="a b").group("p")
    assert subscription(subscribePattern="a b").group("p") != subscription(subscribePattern="a  b").group("p")
