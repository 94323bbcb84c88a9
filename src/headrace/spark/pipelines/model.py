"""Model of a pipeline: sources, steps, sinks and settings, from a TOML or a Python file.

    sources ──▶ steps ──▶ sinks         every sink is one streaming query with its own checkpoint

Sources and steps are named tables; a step reads the sources and the steps above it. The model does not use Spark, so it can be loaded
and checked without Spark.
"""

from __future__ import annotations

import inspect
import os
import re
import stat
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, overload

from headrace.errors import ConfigError
from headrace.spark.pipelines.keys import PIPELINE, RESTART, SINK, SOURCE, STEP, InvalidKey, Watermark, label, name, nearest, read

SERVERS_DEFAULT: Final = "127.0.0.1:8815"
Transform = Callable[..., Any]
F = TypeVar("F", bound=Transform)


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart policy of a failed query. Times are milliseconds."""

    attempts: int = 10
    window: int = 600_000
    backoff: int = 1_000
    backoff_max: int = 60_000
    same_batch: int = 3


@dataclass(frozen=True, slots=True)
class Source:
    """Topics as an unbounded table."""

    name: str
    topics: tuple[str, ...] = ()
    pattern: str = ""
    format: str = "raw"
    schema: str = ""
    starting: str = "earliest"
    bad_records: str = "dlq"
    expect: Mapping[str, str] = field(default_factory=dict)
    watermark: Watermark | None = None
    read: str = "stream"
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Step:
    """A table computed from others by SQL or by a function of DataFrames. The function is imported on first use."""

    name: str
    sql: str = ""
    sql_file: str = ""
    python: str = ""
    function: Transform | None = None
    inputs: tuple[str, ...] = ()
    watermark: Watermark | None = None


@dataclass(frozen=True, slots=True)
class Sink:
    """Target of the rows of a step or source."""

    name: str
    source: str
    kind: str
    mode: str = "append"
    trigger: str = ""
    topic: str = ""
    partitions: int = 1
    key: str = ""
    value: str = ""
    path: str = ""
    table: str = ""
    merge: tuple[str, ...] = ()
    rows: int = 20


# Keys of a sink by kind.
_KEYS_OF_KIND: Final[Mapping[str, tuple[str, ...]]] = {
    "topic": ("topic", "partitions", "key", "value"),
    "delta": ("path", "merge"),
    "iceberg": ("path", "table", "merge"),
    "parquet": ("path",),
    "console": ("rows",),
}
_KEYS_OF_ALL_KINDS: Final = ("from", "kind", "mode", "trigger")


class Pipeline:
    """A pipeline, built by calls.

    pipeline = Pipeline("orders", trigger="1 second")
    pipeline.source("orders", topic="orders", format="json", schema="id long, amount double")

    @pipeline.step
    def large(orders):
        return orders.where("amount > 1000")

    pipeline.sink("large", "large", kind="topic", topic="orders.large")
    """

    def __init__(self, name: str, /, **keys: object) -> None:
        self._head: dict[str, object] = {"name": name, **keys}
        self.directory = Path.cwd()
        self.sources: dict[str, Source] = {}
        self.steps: dict[str, Step] = {}
        self.sinks: dict[str, Sink] = {}
        self._settle()

    def at(self, directory: Path, **overrides: object) -> Pipeline:
        """Set the directory of relative paths and replace keys of `[pipeline]`."""
        self.directory = directory.absolute()
        self._head |= overrides
        self._settle()
        return self

    def _settle(self) -> None:
        given = _read(PIPELINE, self._head, "pipeline")
        restart = given.get("restart", {})
        if not isinstance(restart, Mapping):
            raise InvalidKey("pipeline.restart", "expected a table of keys")
        self.name = str(given["name"])
        self.servers = str(given.get("servers", SERVERS_DEFAULT))
        self.user = str(given.get("user", ""))
        self.password = str(given.get("password", ""))
        self.ca = self.place(str(given["ca"])) if "ca" in given else ""
        self.tls = bool(given.get("tls", False) or self.ca)
        self.checkpoint = self.place(str(given.get("checkpoint", f"checkpoints/{self.name}")))
        self.trigger = str(given.get("trigger", ""))
        self.conf: dict[str, str] = dict(given.get("conf", {}))
        self.restart = Restart(**_read(RESTART, restart, "pipeline.restart"))
        if bool(self.user) != bool(self.password):
            raise InvalidKey("pipeline", "user and password must be set together; only one of them is set")

    def place(self, path: str) -> str:
        """Resolve a path relative to the pipeline's file. A URL (hdfs://) is returned unchanged."""
        if "://" in path:
            return path.removeprefix("file://") if path.startswith("file://") else path
        return str(self.directory / Path(path).expanduser())

    def source(self, name: str, /, **keys: object) -> Source:
        """Declare a source; keys as in `[sources.NAME]`."""
        path = f"sources.{name}"
        self._new_table(name, path)
        given = _read(SOURCE, keys, path)
        named = [key for key in ("topic", "topics", "pattern") if key in given]
        if len(named) != 1:
            raise InvalidKey(path, f"{' and '.join(named) or 'no topic'}: expected one of topic, topics and pattern")
        topics: Any = given.pop("topics", ()) or ((given.pop("topic"),) if "topic" in given else ())
        made = Source(name, topics=topics, **given)
        if made.schema and made.format in ("raw", "string"):
            raise InvalidKey(f"{path}.schema", f'format = "{made.format}" has no columns: set format to json, avro or protobuf')
        if made.read == "table" and made.watermark:
            raise InvalidKey(f"{path}.watermark", 'not supported with read = "table"')
        self.sources[name] = made
        return made

    @overload
    def step(self, function: F, /) -> F: ...
    @overload
    def step(self, function: str, /, **keys: object) -> Step: ...
    @overload
    def step(self, function: None = None, /, **keys: object) -> Callable[[F], F]: ...
    def step(self, function: Any = None, /, **keys: object) -> Any:
        """Declare a step: decorate a function whose parameters name its inputs, or pass a name with keys as in `[steps.NAME]`."""
        if isinstance(function, str):
            return self._add_step(function, None, keys)
        if function is not None:
            self._add_step(function.__name__, function, keys)
            return function

        def decorate(decorated: F) -> F:
            given = dict(keys)
            self._add_step(str(given.pop("name", decorated.__name__)), decorated, given)
            return decorated

        return decorate

    def sink(self, name: str, source: str = "", /, **keys: object) -> Sink:
        """Declare a sink for the rows of `source`; keys as in `[sinks.NAME]`."""
        path = f"sinks.{name}"
        _check_name(label, name, path, "letters, digits and . _ -")
        if name in self.sinks:
            raise InvalidKey(path, "there is a sink of that name already")
        given = _read(SINK, {**({"from": source} if source else {}), **keys}, path)
        origin, kind = str(given.pop("from")), str(given["kind"])
        for key in given:
            if key not in _KEYS_OF_KIND[kind] + _KEYS_OF_ALL_KINDS:
                raise InvalidKey(f"{path}.{key}", f"not supported by kind = {kind!r}{nearest(key, _KEYS_OF_KIND[kind])}")
        made = Sink(name, origin, **given)
        _check_sink(made, path)
        self.sinks[name] = made
        return made

    def check(self) -> None:
        """Check the complete pipeline. Raises `InvalidKey`."""
        tables = [*self.sources, *self.steps]
        if not self.sources:
            raise InvalidKey("sources", "there is none: add [sources.NAME] with a topic")
        if not self.sinks:
            raise InvalidKey("sinks", "there is none: add [sinks.NAME] with from and kind")
        for made in self.sinks.values():
            if made.source not in tables:
                raise InvalidKey(f"sinks.{made.name}.from", f"there is no source or step {made.source!r}{nearest(made.source, tables)}")
        above = list(self.sources)
        for step in self.steps.values():
            for wanted in step.inputs:
                if wanted not in above:
                    raise InvalidKey(f"steps.{step.name}.inputs", f"there is no source or step {wanted!r} above it{nearest(wanted, above)}")
            above.append(step.name)

    def graph(self) -> dict[str, list[dict[str, object]]]:
        """Return sources, steps and sinks with their inputs as plain objects, for those who show the pipeline."""
        tables = [*self.sources]
        steps: list[dict[str, object]] = []
        for step in self.steps.values():
            sql = step.sql or (Path(self.place(step.sql_file)).read_text("utf-8") if step.sql_file else "")
            # A query names its tables itself; a word in it that is the name of a table counts as one.
            inputs = list(step.inputs) or [table for table in tables if re.search(rf"\b{re.escape(table)}\b", sql)]
            if step.function is not None and not step.inputs:
                inputs = [table for table in inspect.signature(step.function).parameters if table in tables]
            text = "SQL" if sql else step.python or getattr(step.function, "__name__", "function")
            steps.append({"name": step.name, "text": text, "sql": textwrap.dedent(sql).strip(), "inputs": inputs})
            tables.append(step.name)
        sources = [{"name": one.name, "text": f"topic {', '.join(one.topics) or one.pattern}"} for one in self.sources.values()]
        sinks = [
            {"name": one.name, "from": one.source, "text": f"{one.kind} {one.topic or one.path or ''}".strip()}
            for one in self.sinks.values()
        ]
        return {"sources": [dict(one) for one in sources], "steps": steps, "sinks": [dict(one) for one in sinks]}

    def secret(self) -> str:
        """Read the password. Raises `ConfigError`."""
        return read_secret(self.password, self.directory) if self.password else ""

    def _add_step(self, name: str, function: Transform | None, keys: Mapping[str, object]) -> Step:
        path = f"steps.{name}"
        self._new_table(name, path)
        given = _read(STEP, keys, path)
        ways = [key for key in ("sql", "sql_file", "python") if key in given]
        if len(ways) + (function is not None) != 1:
            raise InvalidKey(path, f"{' and '.join(ways) or 'nothing to do'}: expected one of sql, sql_file and python")
        if "inputs" in given and ("sql" in given or "sql_file" in given):
            raise InvalidKey(f"{path}.inputs", "not supported by sql: the query names its tables")
        made = Step(name, function=function, **given)
        if made.python and ":" not in made.python:
            raise InvalidKey(f"{path}.python", f"expected module:function, not {made.python!r}")
        self.steps[name] = made
        return made

    def _new_table(self, table: str, path: str) -> None:
        _check_name(name, table, path, "a name that SQL takes without quotes: letters, digits and _")
        if table in self.sources or table in self.steps:
            raise InvalidKey(path, "there is a source or step of that name already")


def _read(keys: Mapping[str, Any], given: Mapping[str, object], path: str) -> dict[str, Any]:
    return read(keys, given, path)


def _check_name(parse: Callable[[object], str], given: str, path: str, expected: str) -> None:
    try:
        parse(given)
    except ValueError:
        raise InvalidKey(path, f"expected {expected}") from None


def _check_sink(sink: Sink, path: str) -> None:
    is_table = sink.kind in ("delta", "iceberg", "parquet")
    if is_table and not sink.path:
        raise InvalidKey(path, "path is missing: the directory of the table")
    if sink.kind == "parquet" and sink.mode != "append":
        raise InvalidKey(f"{path}.mode", f'parquet supports append only: mode = "{sink.mode}" needs kind = "delta" or "iceberg"')
    if sink.kind == "topic" and sink.mode == "complete":
        raise InvalidKey(f"{path}.mode", 'a topic cannot be overwritten: use "append" or "update"')
    if is_table and sink.mode == "update" and not sink.merge:
        raise InvalidKey(path, 'mode = "update" needs merge: the key columns by which a changed row replaces the old one')
    if sink.merge and sink.mode != "update":
        raise InvalidKey(f"{path}.merge", 'supported only with mode = "update"')
    if sink.table and len(sink.table.split(".")) != 2:
        raise InvalidKey(f"{path}.table", "expected namespace.table")


def read_secret(reference: str, directory: Path) -> str:
    """Read the secret at `file:PATH` or `env:NAME`. A file that others can read is an error."""
    kind, _, place = reference.partition(":")
    if kind == "env":
        if not os.environ.get(place):
            raise ConfigError(f"password: the environment variable {place} is not set")
        return os.environ[place]
    path = directory / Path(place).expanduser()
    try:
        with path.open(encoding="utf-8") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            secret = stream.readline(65_537).strip()
    except OSError as failure:
        raise ConfigError(f"password: {path}: {failure.strerror or failure}") from None
    if stat.S_ISREG(mode) and mode & 0o007:
        raise ConfigError(f"password: {path} can be read by others (mode {mode & 0o777:o}); chmod 600 it")
    if not secret:
        raise ConfigError(f"password: {path} is empty")
    return secret
