"""Table of the keys of a pipeline, for TOML files and for calls from Python.

An unknown key is an error with the nearest name, a wrong value an error with the expected one. The caller catches `InvalidKey` and adds
the file and the line.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

FORMATS: Final = ("raw", "string", "json", "avro", "protobuf")
BAD_RECORDS: Final = ("dlq", "fail", "null")
KINDS: Final = ("topic", "delta", "iceberg", "parquet", "console")
MODES: Final = ("append", "update", "complete")
AVAILABLE_NOW: Final = "available-now"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)
_LABEL: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", re.ASCII)
_DURATION: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", re.ASCII)
_UNITS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 1),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1_000),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60_000),
    **dict.fromkeys(("h", "hour", "hours"), 3_600_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000),
}


class InvalidKey(ValueError):
    """An unknown key or a wrong value. `path` is its position in the pipeline: `sources.orders.format`."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}: {text}" if path else text)
        self.path, self.text = path, text


@dataclass(frozen=True, slots=True)
class Key:
    """One key: parser of its value, expected form, meaning."""

    parse: Callable[[object], object]
    expected: str
    text: str
    required: bool = False


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the end of an error message: the nearest valid name, else the valid names."""
    candidates = list(valid)
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if found:
        return f"; did you mean {found[0]}?"
    return f"; there is {', '.join(candidates[:12])}{', …' if len(candidates) > 12 else ''}" if candidates else ""


def read(keys: Mapping[str, Key], given: Mapping[str, object], path: str) -> dict[str, object]:
    """Parse the given keys. Raises `InvalidKey`."""
    found: dict[str, object] = {}
    for name, raw in given.items():
        if name not in keys:
            raise InvalidKey(f"{path}.{name}", f"unknown key{nearest(name, keys)}")
        try:
            found[name] = keys[name].parse(raw)
        except ValueError as failure:
            # The wrong value may be the secret instead of a reference to it.
            shown = "" if keys[name].parse is secret else f", not {short(raw)}"
            because = f"{failure}; " if str(failure) else ""
            raise InvalidKey(f"{path}.{name}", f"{because}expected {keys[name].expected}{shown}") from None
    for name, key in keys.items():
        if key.required and name not in given:
            raise InvalidKey(path, f"{name} is missing: {key.expected}")
    return found


def short(value: object) -> str:
    """Return a short representation for error messages."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def text(raw: object) -> str:
    """Parse a text that is not empty."""
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError
    return raw


def name(raw: object) -> str:
    """Parse a table name that needs no quotes in SQL."""
    if not isinstance(raw, str) or not _NAME.fullmatch(raw):
        raise ValueError
    return raw


def label(raw: object) -> str:
    """Parse a name that is valid for a directory, a group and a process."""
    if not isinstance(raw, str) or not _LABEL.fullmatch(raw):
        raise ValueError
    return raw


def texts(raw: object) -> tuple[str, ...]:
    """Parse one text, or a list of texts."""
    if isinstance(raw, str):
        return (text(raw),)
    if not isinstance(raw, Sequence) or not raw or isinstance(raw, bytes):
        raise ValueError
    return tuple(text(each) for each in raw)


def choice(valid: Sequence[str]) -> Callable[[object], str]:
    """Return a parser that accepts one of these words."""

    def parse(raw: object) -> str:
        if not isinstance(raw, str) or raw not in valid:
            raise ValueError
        return raw

    return parse


def count(low: int) -> Callable[[object], int]:
    """Return a parser of whole numbers of at least `low`."""

    def parse(raw: object) -> int:
        if not isinstance(raw, int) or isinstance(raw, bool) or raw < low:
            raise ValueError
        return raw

    return parse


def flag(raw: object) -> bool:
    if not isinstance(raw, bool):
        raise ValueError
    return raw


def duration(raw: object) -> int:
    """Parse "10 seconds" or "10s" to milliseconds."""
    match = _DURATION.fullmatch(raw.lower()) if isinstance(raw, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError
    return int(float(match[1]) * _UNITS[match[2]])


def trigger(raw: object) -> str:
    """Parse a trigger to the form that Spark expects."""
    if raw == AVAILABLE_NOW:
        return AVAILABLE_NOW
    return f"{duration(raw)} milliseconds"


def watermark(raw: object) -> Watermark:
    """Parse `{ column = "at", delay = "1 minute" }`."""
    if not isinstance(raw, Mapping) or set(raw) != {"column", "delay"}:
        raise ValueError
    return Watermark(text(raw["column"]), f"{duration(raw['delay'])} milliseconds")


def settings(raw: object) -> dict[str, str]:
    """Parse names with plain values to strings, for Spark's options and settings."""
    if not isinstance(raw, Mapping):
        raise ValueError
    return {text(key): _plain(value) for key, value in raw.items()}


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, (str, int, float)):
        raise ValueError
    return str(value)


def secret(raw: object) -> str:
    """Parse a reference to a secret."""
    if not isinstance(raw, str) or raw.partition(":")[0] not in ("file", "env") or not raw.partition(":")[2]:
        raise ValueError
    return raw


@dataclass(frozen=True, slots=True)
class Watermark:
    """Spark watermark: time column and allowed delay of late rows."""

    column: str
    delay: str


_TOPIC = "the name of a topic"
_WAIT = 'a duration such as "10 seconds"'

PIPELINE: Final[Mapping[str, Key]] = {
    "name": Key(label, "letters, digits and . _ -", "Name for `list`, `status` and `stop`. Default: the name of the file."),
    "servers": Key(text, "host:port, several with commas", "Address of the Flight endpoint. Default: `127.0.0.1:8815`."),
    "user": Key(text, "a name", "User name."),
    "password": Key(secret, '"file:PATH" or "env:NAME"', "Location of the user's password."),
    "tls": Key(flag, "true or false", "Whether the Flight endpoint uses TLS."),
    "ca": Key(text, "the path of a file", "PEM file with the trusted certificate authority; implies `tls`."),
    "checkpoint": Key(text, "a directory", "Directory of progress and state. Default: `checkpoints/NAME` beside the file."),
    "trigger": Key(
        trigger,
        'a duration such as "1 second", or "available-now"',
        "Interval of micro-batches. Default: as soon as records arrive. `available-now`: read the existing records, then end.",
    ),
    "conf": Key(settings, "a table of Spark settings", 'Settings of the Spark session: `"spark.sql.shuffle.partitions" = 8`.'),
    "restart": Key(lambda raw: raw, "a table", "Restarts of failed queries; see `[pipeline.restart]`."),
}
RESTART: Final[Mapping[str, Key]] = {
    "attempts": Key(count(0), "a whole number", "Number of failures of a query allowed within `window`. Default: 10."),
    "window": Key(duration, _WAIT, "Period in which failures are counted. Default: 10 minutes."),
    "backoff": Key(duration, _WAIT, "The pause before the first restart, doubled each time. Default: 1 second."),
    "backoff_max": Key(duration, _WAIT, "The longest pause. Default: 1 minute."),
    "same_batch": Key(count(1), "a whole number from 1", "Number of equal failures of one batch that ends the pipeline. Default: 3."),
}
SOURCE: Final[Mapping[str, Key]] = {
    "topic": Key(text, _TOPIC, "The topic to read."),
    "topics": Key(texts, "a list of topics", "The topics to read, if there are several."),
    "pattern": Key(text, "a regular expression", "Read all topics whose whole name matches, including new topics."),
    "format": Key(choice(FORMATS), f"one of {', '.join(FORMATS)}", "Format of the values. Default: `raw`, plain bytes."),
    "schema": Key(text, 'Spark DDL such as "id long, at timestamp"', "The columns of a value. Default: the schema the topic requires."),
    "starting": Key(
        text,
        '"earliest", "latest" or offsets as JSON',
        "Start of a new pipeline. Default: `earliest`. A restart uses the checkpoint.",
    ),
    "bad_records": Key(
        choice(BAD_RECORDS),
        f"one of {', '.join(BAD_RECORDS)}",
        "Action for a record that cannot be decoded: move it to the dead letters of its topic (`dlq`, the default), fail the batch "
        "(`fail`), or set its columns to null (`null`).",
    ),
    "expect": Key(
        settings,
        "a table of names and SQL conditions",
        "Conditions on rows. A row that fails one is moved to the dead letters with `not met: ` and the name: "
        '`expect = { "amount is positive" = "amount > 0" }`.',
    ),
    "watermark": Key(
        watermark, '{ column = "at", delay = "1 minute" }', "Allowed delay of late rows and their time column; see Spark's watermarks."
    ),
    "read": Key(choice(("stream", "table")), "stream or table", "`table`: the records at the start, for joins. Default: `stream`."),
    "options": Key(settings, "a table", "More options of the data source: `{ maxOffsetsPerTrigger = 100000 }`; see the page on Spark."),
}
STEP: Final[Mapping[str, Key]] = {
    "sql": Key(text, "a query", "Spark SQL; sources and the steps above are tables."),
    "sql_file": Key(text, "the path of a file", "File with the SQL, relative to this file."),
    "python": Key(
        text,
        "module:function",
        "A function from DataFrames to a DataFrame, in a module beside this file or installed.",
    ),
    "inputs": Key(texts, "names of sources and steps", "Arguments of the function. Default: the names of its parameters."),
    "watermark": Key(watermark, '{ column = "at", delay = "1 minute" }', "A watermark on the result of the step."),
}
SINK: Final[Mapping[str, Key]] = {
    "from": Key(name, "the name of a step or source", "The step or source to write.", required=True),
    "kind": Key(choice(KINDS), f"one of {', '.join(KINDS)}", "The kind of target.", required=True),
    "mode": Key(
        choice(MODES),
        f"one of {', '.join(MODES)}",
        "`append`: final rows (the default). `update`: changed rows. `complete`: the whole result, every time.",
    ),
    "trigger": Key(trigger, 'a duration, or "available-now"', "Trigger of this sink. Default: that of the pipeline."),
    "topic": Key(text, _TOPIC, "kind topic: the topic, created if it does not exist. Default: the column `topic` of each row."),
    "partitions": Key(count(1), "a whole number from 1", "kind topic: number of partitions of a created topic. Default: 1."),
    "key": Key(text, "a column or SQL expression", "kind topic: the key of a record."),
    "value": Key(text, "a column or SQL expression", "kind topic: the value of a record. Default: the row as a JSON object."),
    "path": Key(text, "a directory", "kind delta, iceberg, parquet: directory of the table, created if it does not exist."),
    "table": Key(text, "namespace.table", "kind iceberg: name of the table in the catalog. Default: `headrace.` and the name of the sink."),
    "merge": Key(
        texts, "names of columns", "kind delta, iceberg with mode update: the key columns; a row replaces the one with the same key."
    ),
    "rows": Key(count(1), "a whole number from 1", "kind console: number of rows shown per batch. Default: 20."),
}
SECTIONS: Final[Mapping[str, Mapping[str, Key]]] = {
    "pipeline": PIPELINE,
    "pipeline.restart": RESTART,
    "sources": SOURCE,
    "steps": STEP,
    "sinks": SINK,
}
