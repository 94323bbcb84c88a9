"""The model of pipelines in TOML and Python: an error names the key, its line and the expected value."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.spark.pipelines import Pipeline, load
from headrace.spark.pipelines.archive import archive_pipeline
from headrace.spark.pipelines.files import line_of
from headrace.spark.pipelines.keys import InvalidKey, Watermark, duration, trigger
from headrace.spark.pipelines.model import Restart

WHOLE = """\
[pipeline]
name = "orders"
servers = "broker:8815"
checkpoint = "state"
trigger = "1 second"
conf = { "spark.sql.shuffle.partitions" = 8, "spark.ui.enabled" = true }

[pipeline.restart]
attempts = 3
window = "1 minute"

[sources.orders]
topics = ["orders", "orders.eu"]
format = "json"
schema = "id long, at timestamp"
watermark = { column = "at", delay = "1 minute" }
options = { maxOffsetsPerTrigger = 1000 }

[steps.large]
sql = "select * from orders where id > 5"

[steps.named]
python = "steps:named"
inputs = ["large"]

[sinks.out]
from = "named"
kind = "topic"
topic = "out"
key = "id"
"""
SMALL = """\
[sources.orders]
topic = "orders"

[sinks.out]
from = "orders"
kind = "topic"
topic = "out"
"""


def written(tmp_path: Path, text: str, name: str = "orders.toml") -> Path:
    file = tmp_path / name
    file.write_text(textwrap.dedent(text))
    return file


def fault_of(tmp_path: Path, text: str) -> str:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load(file)
    return str(caught.value).removeprefix(str(file))


def test_a_toml_file_says_everything_the_model_knows(tmp_path: Path) -> None:
    pipeline = load(written(tmp_path, WHOLE))
    assert (pipeline.name, pipeline.servers, pipeline.trigger) == ("orders", "broker:8815", "1000 milliseconds")
    assert pipeline.checkpoint == str(tmp_path / "state")
    assert pipeline.conf == {"spark.sql.shuffle.partitions": "8", "spark.ui.enabled": "true"}
    assert pipeline.restart == Restart(attempts=3, window=60_000)
    orders = pipeline.sources["orders"]
    assert (orders.topics, orders.format, orders.starting, orders.bad_records) == (("orders", "orders.eu"), "json", "earliest", "dlq")
    assert orders.watermark == Watermark("at", "60000 milliseconds")
    assert orders.options == {"maxOffsetsPerTrigger": "1000"}
    assert pipeline.steps["named"].inputs == ("large",)
    assert (pipeline.sinks["out"].source, pipeline.sinks["out"].mode, pipeline.sinks["out"].key) == ("named", "append", "id")


def test_the_smallest_file_has_a_name_and_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    pipeline = load(written(tmp_path, SMALL, "copy.toml"))
    assert pipeline.name == "copy"
    assert pipeline.checkpoint == str(tmp_path / "checkpoints" / "copy")
    assert pipeline.servers == "127.0.0.1:8815"


def test_a_python_file_makes_the_same_model(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        """
        from headrace.spark.pipelines import Pipeline

        pipeline = Pipeline("orders", servers="broker:8815", checkpoint="state", trigger="1 second", restart={"attempts": 3})
        pipeline.source("orders", topic="orders", format="json", schema="id long")
        pipeline.step("large", sql="select * from orders where id > 5")

        @pipeline.step
        def named(large):
            return large

        @pipeline.step(name="again", inputs=["large"])
        def whatever(frame):
            return frame

        pipeline.sink("out", "named", kind="topic", topic="out")
        """,
        "orders.py",
    )
    pipeline = load(file)
    assert (pipeline.name, pipeline.checkpoint, pipeline.restart.attempts) == ("orders", str(tmp_path / "state"), 3)
    assert list(pipeline.steps) == ["large", "named", "again"]
    assert pipeline.steps["named"].function is not None
    assert pipeline.steps["again"].inputs == ("large",)


def test_the_command_line_overrides_both_kinds_of_file(tmp_path: Path) -> None:
    script = 'from headrace.spark.pipelines import Pipeline\npipeline = Pipeline("p")\n'
    script += 'pipeline.source("a", topic="a")\npipeline.sink("b", "a", kind="console")\n'
    for file in (written(tmp_path, SMALL), written(tmp_path, script, "p.py")):
        pipeline = load(file, checkpoint="/elsewhere", servers="other:1")
        assert (pipeline.checkpoint, pipeline.servers) == ("/elsewhere", "other:1")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("[pipelin]\n", ":1: pipelin: unknown section; did you mean pipeline?"),
        ("[pipeline]\ntriger = '1 second'\n", ":2: pipeline.triger: unknown key; did you mean trigger?"),
        (
            "[pipeline]\ntrigger = 'now'\n",
            ':2: pipeline.trigger: expected a duration such as "1 second", or "available-now", not \'now\'',
        ),
        ("[pipeline]\n[pipeline.restart]\nattemps = 1\n", ":3: pipeline.restart.attemps: unknown key; did you mean attempts?"),
        ("[pipeline]\nuser = 'a'\n", ":1: pipeline: user and password must be set together; only one of them is set"),
        (
            "[pipeline]\nuser = 'a'\npassword = 'geheim'\n",
            ':3: pipeline.password: expected "file:PATH" or "env:NAME"',
        ),
        ("[sources.a]\nformt = 'json'\n", ":2: sources.a.formt: unknown key; did you mean format?"),
        ("[sources.a]\nformat = 'jsn'\n", ":2: sources.a.format: expected one of raw, string, json, avro, protobuf, not 'jsn'"),
        ("[sources.a]\nformat = 'json'\n", ":1: sources.a: no topic: expected one of topic, topics and pattern"),
        (
            "[sources.a]\ntopic = 'a'\npattern = 'b'\n",
            ":1: sources.a: topic and pattern: expected one of topic, topics and pattern",
        ),
        (
            "[sources.a]\ntopic = 'a'\nschema = 'id long'\n",
            ':3: sources.a.schema: format = "raw" has no columns: set format to json, avro or protobuf',
        ),
        ("[sources.a-b]\ntopic = 'a'\n", ":1: sources.a-b: expected a name that SQL takes without quotes: letters, digits and _"),
        ("[sources]\na = 1\n", ":2: sources.a: expected a section [sources.NAME]"),
        (SMALL + "[steps.orders]\nsql = 'select 1'\n", ":8: steps.orders: there is a source or step of that name already"),
        (SMALL + "[steps.s]\n", ":8: steps.s: nothing to do: expected one of sql, sql_file and python"),
        (SMALL + "[steps.s]\nsql = 'a'\npython = 'a:b'\n", ":8: steps.s: sql and python: expected one of sql, sql_file and python"),
        (SMALL + "[steps.s]\npython = 'a'\n", ":9: steps.s.python: expected module:function, not 'a'"),
        (
            SMALL + "[steps.s]\npython = 'a:b'\ninputs = ['order']\n",
            ":10: steps.s.inputs: there is no source or step 'order' above it; did you mean orders?",
        ),
        (
            SMALL.replace('from = "orders"', 'from = "ordres"'),
            ":5: sinks.out.from: there is no source or step 'ordres'; did you mean orders?",
        ),
        (SMALL.replace('from = "orders"\n', ""), ":4: sinks.out: from is missing: the name of a step or source"),
        (SMALL + "path = 'x'\n", ":8: sinks.out.path: not supported by kind = 'topic'; there is topic, partitions, key, value"),
        (
            SMALL + "mode = 'complete'\n",
            ':8: sinks.out.mode: a topic cannot be overwritten: use "append" or "update"',
        ),
        (
            SMALL.replace('kind = "topic"\ntopic = "out"', 'kind = "delta"\npath = "x"\nmode = "update"'),
            ':4: sinks.out: mode = "update" needs merge: the key columns by which a changed row replaces the old one',
        ),
        (
            SMALL.replace('kind = "topic"\ntopic = "out"', 'kind = "parquet"\npath = "x"\nmode = "complete"'),
            ':8: sinks.out.mode: parquet supports append only: mode = "complete" needs kind = "delta" or "iceberg"',
        ),
        (SMALL.replace('kind = "topic"\ntopic = "out"', 'kind = "delta"'), ":4: sinks.out: path is missing: the directory of the table"),
        ("[sources.a]\ntopic = 'a'\n", ": sinks: there is none: add [sinks.NAME] with from and kind"),
        ("[sinks.a]\nfrom = 'a'\nkind = 'console'\n", ": sources: there is none: add [sources.NAME] with a topic"),
        ("[sources.a\n", ": Expected ']' at the end of a table declaration (at line 1, column 11)"),
    ],
)
def test_a_fault_is_named_with_its_line_and_its_key(tmp_path: Path, text: str, fault: str) -> None:
    assert fault_of(tmp_path, text) == fault


def test_a_fault_in_a_python_file_has_its_line(tmp_path: Path) -> None:
    file = written(tmp_path, 'from headrace.spark.pipelines import Pipeline\n\npipeline = Pipeline("p", triger=1)\n', "p.py")
    with pytest.raises(ConfigError, match=r"p\.py:3: pipeline\.triger: unknown key; did you mean trigger\?"):
        load(file)


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("pipeline = 1\n", "no pipeline found: expected pipeline = Pipeline(...)"),
        ("pipeline = (\n", "'(' was never closed"),
        ("import no_such_module\n", "No module named 'no_such_module'"),
        ("import os\nwhere = os.environ['NOWHERE_AT_ALL']\n", "p.py:2: KeyError: 'NOWHERE_AT_ALL'"),
    ],
)
def test_a_python_file_without_a_pipeline_is_rejected(tmp_path: Path, script: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(written(tmp_path, script, "p.py"))
    assert fault in str(caught.value)


def test_spark_is_not_there_while_a_file_is_read(tmp_path: Path) -> None:
    script = "class PySparkRuntimeError(Exception): pass\nraise PySparkRuntimeError('[SESSION_OR_CONTEXT_NOT_EXISTS] no session')\n"
    with pytest.raises(ConfigError, match=r"p\.py:2: this needs a Spark session.*: move it into the function of a step"):
        load(written(tmp_path, script, "p.py"))


@pytest.mark.parametrize("name", ["absent.toml", "orders.yaml"])
def test_a_file_that_is_none_is_rejected(tmp_path: Path, name: str) -> None:
    (tmp_path / "orders.yaml").touch()
    with pytest.raises(ConfigError, match=r"no such file|a \.toml or a \.py file"):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "path", "line"),
    [
        (WHOLE, "sources.orders.format", 14),
        (WHOLE, "pipeline.restart.window", 10),
        (WHOLE, "sinks.out", 26),
        ("[pipeline]\nrestart.window = 1\n", "pipeline.restart.window", 2),
        ("x = 1\n", "sources.a", None),
    ],
)
def test_the_line_of_a_key_is_found_where_it_is_written(text: str, path: str, line: int | None) -> None:
    assert line_of(text, path) == line


@pytest.mark.parametrize(("text", "ms"), [("5ms", 5), ("1 second", 1000), ("1.5 s", 1500), ("2 minutes", 120_000), ("1d", 86_400_000)])
def test_durations_are_written_as_spark_users_write_them(text: str, ms: int) -> None:
    assert duration(text) == ms
    assert trigger(text) == f"{ms} milliseconds"


@pytest.mark.parametrize("text", ["", "1", "1 fortnight", "-1 s", 5, None])
def test_what_is_no_duration_is_rejected(text: object) -> None:
    with pytest.raises(ValueError):
        duration(text)


def test_a_password_comes_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("geheim\n")
    secret.chmod(0o644)
    pipeline = Pipeline("p", user="anna", password="file:password").at(tmp_path)
    with pytest.raises(ConfigError, match="can be read by others"):
        pipeline.secret()
    secret.chmod(0o600)
    assert pipeline.secret() == "geheim"


def test_a_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Pipeline("p", user="anna", password="env:SECRET_OF_ANNA")
    with pytest.raises(ConfigError, match="SECRET_OF_ANNA is not set"):
        pipeline.secret()
    monkeypatch.setenv("SECRET_OF_ANNA", "geheim")
    assert pipeline.secret() == "geheim"


def test_a_checkpoint_with_a_scheme_is_left_alone(tmp_path: Path) -> None:
    assert Pipeline("p", checkpoint="hdfs://a/b").at(tmp_path).checkpoint == "hdfs://a/b"
    assert Pipeline("p", checkpoint="file:///a/b").at(tmp_path).checkpoint == "/a/b"


def test_an_archive_is_a_pipeline_with_a_checkpoint_beside_its_table(tmp_path: Path) -> None:
    made = archive_pipeline("orders.eu", "iceberg", str(tmp_path / "lake"), servers="broker:1")
    assert (made.name, made.servers, made.checkpoint) == ("archive.orders.eu", "broker:1", str(tmp_path / "lake.checkpoint/orders.eu"))
    assert made.sources["records"].topics == ("orders.eu",)
    assert (made.sinks["table"].path, made.sinks["table"].table) == (str(tmp_path / "lake"), "headrace.orders_eu")


def test_no_two_topics_share_the_checkpoint_of_an_archive(tmp_path: Path) -> None:
    topics = ("a-b", "a/b", "a:b", "x" * 200, "x" * 201, "é")
    made = [archive_pipeline(topic, "iceberg", str(tmp_path / "lake")) for topic in topics]
    assert len({each.checkpoint for each in made}) == len({each.name for each in made}) == len(topics)


def test_two_things_of_one_name_are_rejected() -> None:
    pipeline = Pipeline("p")
    pipeline.source("a", topic="a")
    pipeline.sink("out", "a", kind="console")
    with pytest.raises(InvalidKey, match="sinks.out: there is a sink of that name already"):
        pipeline.sink("out", "a", kind="console")
    with pytest.raises(InvalidKey, match="sources.a: there is a source or step of that name already"):
        pipeline.source("a", topic="b")


def test_the_graph_names_the_inputs_of_each_step_and_the_sql() -> None:
    pipeline = Pipeline("p")
    pipeline.source("orders", topic="orders")
    pipeline.source("rates", topics=["a", "b"])
    pipeline.step("priced", sql="select * from orders join rates on orders.c = rates.c -- not reorders")

    @pipeline.step
    def large(priced: object) -> object:
        return priced

    pipeline.sink("out", "large", kind="topic", topic="large")
    pipeline.sink("files", "orders", kind="parquet", path="files")
    graph = pipeline.graph()
    assert [(one["name"], one["text"]) for one in graph["sources"]] == [("orders", "topic orders"), ("rates", "topic a, b")]
    assert [(one["name"], one["inputs"], one["text"]) for one in graph["steps"]] == [
        ("priced", ["orders", "rates"], "SQL"),
        ("large", ["priced"], "large"),
    ]
    assert str(graph["steps"][0]["sql"]).startswith("select * from orders")
    assert [(one["name"], one["from"], one["text"]) for one in graph["sinks"]] == [
        ("out", "large", "topic large"),
        ("files", "orders", "parquet files"),
    ]
