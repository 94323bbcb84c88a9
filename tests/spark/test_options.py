"""Names, types and errors of options."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.spark.options import OPTIONS, UNSUPPORTED, Options


def test_names_are_unique_and_case_does_not_matter() -> None:
    names = [name.lower() for option in OPTIONS for name in (option.name, *option.aliases)]
    assert len(names) == len(set(names))
    assert Options({"STARTINGoffsets": "earliest"}).text("startingOffsets") == "earliest"


@pytest.mark.parametrize("spelling", ["kafka.bootstrap.servers", "bootstrap.servers", "servers", "Servers"])
def test_the_address_has_three_names(spelling: str) -> None:
    assert Options({spelling: " a:1 "}).text("kafka.bootstrap.servers") == "a:1"


def test_two_names_for_one_option_must_not_disagree() -> None:
    assert Options({"servers": "a", "bootstrap.servers": "a"}).text("kafka.bootstrap.servers") == "a"
    with pytest.raises(ConfigError, match="kafka.bootstrap.servers is given twice"):
        Options({"servers": "a", "bootstrap.servers": "b"})


@pytest.mark.parametrize(
    "wrong, right", [("maxOffsetPerTrigger", "maxOffsetsPerTrigger"), ("subcribe", "subscribe"), ("failondatalos", "failOnDataLoss")]
)
def test_a_misspelt_option_is_rejected_with_the_nearest_name(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"no option {wrong}; did you mean {right}\\?"):
        Options({wrong: "1"})


def test_an_option_like_no_other_is_rejected_with_the_page_that_lists_them() -> None:
    with pytest.raises(ConfigError, match="no option colour; docs/spark.md"):
        Options({"colour": "red"})


@pytest.mark.parametrize(
    "name", ["kafka.max.poll.records", "kafka.fetch.min.bytes", "checkpointLocation", "partition.metadata.cache.ttl.ms"]
)
def test_what_tunes_a_kafka_client_or_belongs_to_spark_is_passed_over(name: str) -> None:
    assert list(Options({name: "1"})) == []


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_what_kafkas_source_rejects_is_rejected_with_a_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not supported: ."):
        Options({name: "x"})


@pytest.mark.parametrize(
    "text, ms", [("15m", 900_000), ("30s", 30_000), ("500ms", 500), ("7", 7), ("2h", 7_200_000), ("1 min", 60_000), ("1d", 86_400_000)]
)
def test_durations_are_written_as_in_spark(text: str, ms: int) -> None:
    assert Options({"maxTriggerDelay": text}).duration_ms("maxTriggerDelay", 1) == ms


@pytest.mark.parametrize("text, size", [("100", 100), ("64m", 64 << 20), ("1g", 1 << 30), ("2 KiB", 2048), ("3kb", 3072), ("1T", 1 << 40)])
def test_sizes_are_written_as_in_spark(text: str, size: int) -> None:
    assert Options({"maxBytesPerTrigger": text}).size_bytes("maxBytesPerTrigger") == size


def test_what_is_not_given_has_its_default() -> None:
    nothing = Options({})
    assert nothing.flag("failOnDataLoss", True) is True
    assert nothing.count("minPartitions", None) is None
    assert nothing.duration_ms("maxTriggerDelay", 900_000) == 900_000
    assert nothing.size_bytes("maxBytesPerTrigger") is None
    assert nothing.choice("startingOffsetsByTimestampStrategy", ("error", "latest")) == "error"


def test_a_value_of_the_wrong_kind_is_named_with_its_option() -> None:
    wrong = Options(
        {
            "failOnDataLoss": "maybe",
            "minPartitions": "0",
            "maxOffsetsPerTrigger": "many",
            "maxTriggerDelay": "soon",
            "maxBytesPerTrigger": "big",
            "startingOffsetsByTimestampStrategy": "guess",
        }
    )
    with pytest.raises(ConfigError, match='failOnDataLoss: expected true or false, got "maybe"'):
        wrong.flag("failOnDataLoss", True)
    with pytest.raises(ConfigError, match='minPartitions: expected a number of at least 1, got "0"'):
        wrong.count("minPartitions", None)
    with pytest.raises(ConfigError, match='maxOffsetsPerTrigger: expected a number of at least 1, got "many"'):
        wrong.count("maxOffsetsPerTrigger", None)
    with pytest.raises(ConfigError, match="maxTriggerDelay: expected a duration such as 15m"):
        wrong.duration_ms("maxTriggerDelay", 1)
    with pytest.raises(ConfigError, match="maxBytesPerTrigger: expected a size such as 64m"):
        wrong.size_bytes("maxBytesPerTrigger")
    with pytest.raises(ConfigError, match=': expected error or latest, got "guess"'):
        wrong.choice("startingOffsetsByTimestampStrategy", ("error", "latest"))


def test_the_options_of_a_job_never_show_their_values() -> None:
    assert repr(Options({"password": "swordfish", "user": "ann"})) == "Options(password, user)"
