"""docs/spark.md: its examples run in order, and its tables equal those of the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import headrace.spark
from headrace.flight.client import FlightClient
from headrace.spark.columns import COLUMNS
from headrace.spark.options import CONNECTION_OPTIONS, SINK_OPTIONS, SOURCE_OPTIONS, UNSUPPORTED, VALUE_OPTIONS, Option, option_table
from headrace.spark.session import JAVA_VERSION_MIN, SETTINGS
from tests.spark.rows import publish
from tests.spark.serving import FlightBroker

PAGE = (Path(__file__).parent.parent.parent / "docs" / "spark.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    start = PAGE.index(f"\n## {title}\n")
    end = PAGE.find("\n## ", start + 1)
    return PAGE[start : end if end > 0 else len(PAGE)]


@pytest.mark.parametrize("options", [CONNECTION_OPTIONS, SOURCE_OPTIONS, SINK_OPTIONS, VALUE_OPTIONS], ids=lambda options: options[0].name)
def test_the_page_has_the_table_of_options_of_the_code(options: tuple[Option, ...]) -> None:
    assert option_table(options) in PAGE, f"the table in docs/spark.md should be:\n{option_table(options)}"


def test_the_page_names_what_is_rejected_with_kafka() -> None:
    for name in UNSUPPORTED:
        kind = name.removeprefix("kafka.").split(".")[-1]
        assert name in PAGE or kind in ("serializer", "deserializer") or name.startswith("kafka.ssl."), name


def test_the_page_names_every_column_with_its_type() -> None:
    rows = dict(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([^|]+) \|", section("Read a batch"), re.MULTILINE))
    described = {name.strip("` "): kind.replace(": ", ":").replace(", ", ",") for names, kind in rows.items() for name in names.split(",")}
    assert described == {name: kind.simpleString() for name, kind in COLUMNS.items()}


def test_the_page_names_every_setting_of_the_session() -> None:
    text = section("A session")
    for name, value in SETTINGS.items():
        assert f"`{name}`" in text and value.rpartition(".")[2] in text, name
    assert f"Java {JAVA_VERSION_MIN} or newer" in PAGE


def test_the_examples_run(
    spark: SparkSession,
    broker: FlightBroker,
    flight_client: FlightClient,
    fresh_topic: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    topic = fresh_topic(partitions=2)
    publish(flight_client, topic, [b"first", b"second"])
    monkeypatch.setattr(headrace.spark, "session", lambda *arguments, **conf: spark)
    names: dict[str, object] = {}
    for title in ("A session", "Read a batch", "Read a stream"):
        for block in re.findall(r"```python\n(.*?)```", section(title), re.DOTALL):
            code = block.replace("127.0.0.1:8815", broker.address).replace('"orders"', f'"{topic}"').replace('"out/', f'"{tmp_path}/')
            exec(compile(code, f"docs/spark.md, {title}", "exec"), names)
    out = capsys.readouterr().out
    assert "|first |" in out.replace("| first|", "|first |") and "|        0|      2|" in out
    assert spark.read.parquet(f"{tmp_path}/orders").count() == 2
    assert flight_client.committed(f"spark-headrace-{topic}", topic) == {0: 2, 1: 0}
