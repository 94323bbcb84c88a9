"""The keys of a pipeline: what each may hold, in one table for TOML files and for calls from Python.

A key that nobody knows is refused with the nearest name, a wrong value with what would be right. Where the key stands (which file,
which line) is known to the caller, who catches `Misfit` and says so.
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


class Misfit(ValueError):
    """A key or a value that does not belong; `path` says where in the pipeline: `sources.orders.format`."""

    def __init__(self, path: str, text: str) -> None:
        super().__init__(f"{path}: {text}" if path else text)
        self.path, self.text = path, text


@dataclass(frozen=True, slots=True)
class Key:
    """One key: how its value is read, what is expected of it, what it means."""

    parse: Callable[[object], object]
    expected: str
    text: str
    required: bool = False


def nearest(name: str, valid: Iterable[str]) -> str:
    """The end of an error line: what was probably meant, else what there is."""
    candidates = list(valid)
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if found:
        return f"; did you mean {found[0]}?"
    return f"; there is {', '.join(candidates[:12])}{', …' if len(candidates) > 12 else ''}" if candidates else ""


def read(keys: Mapping[str, Key], given: Mapping[str, object], path: str) -> dict[str, object]:
    """The parsed values of those keys that are given; raises `Misfit`."""
    found: dict[str, object] = {}
    for name, raw in given.items():
        if name not in keys:
            raise Misfit(f"{path}.{name}", f"unknown key{nearest(name, keys)}")
        try:
            found[name] = keys[name].parse(raw)
        except ValueError as failure:
            # What was written instead of a reference to a secret may be the secret.
            shown = "" if keys[name].parse is secret else f", not {short(raw)}"
            because = f"{failure}; " if str(failure) else ""
            raise Misfit(f"{path}.{name}", f"{because}expected {keys[name].expected}{shown}") from None
    for name, key in keys.items():
        if key.required and name not in given:
            raise Misfit(path, f"{name} is missing: {key.expected}")
    return found


def short(value: object) -> str:
    """On one line, whatever it is."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def text(raw: object) -> str:
    """Text that is not empty."""
    if not isinstance(raw, str) or not raw.strip():
        raise ValueError
    return raw


def name(raw: object) -> str:
    """What SQL can call a table without quotes."""
    if not isinstance(raw, str) or not _NAME.fullmatch(raw):
        raise ValueError
    return raw


def label(raw: object) -> str:
    """What can be the name of a directory, of a group and of a process."""
    if not isinstance(raw, str) or not _LABEL.fullmatch(raw):
        raise ValueError
    return raw


def texts(raw: object) -> tuple[str, ...]:
    """One text, or several."""
    if isinstance(raw, str):
        return (text(raw),)
    if not isinstance(raw, Sequence) or not raw or isinstance(raw, bytes):
        raise ValueError
    return tuple(text(each) for each in raw)


def choice(valid: Sequence[str]) -> Callable[[object], str]:
    """One of these words."""

    def parse(raw: object) -> str:
        if not isinstance(raw, str) or raw not in valid:
            raise ValueError
        return raw

    return parse


def count(low: int) -> Callable[[object], int]:
    """A whole number from there on."""

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
    """Milliseconds, of "10 seconds" or "10s"."""
    match = _DURATION.fullmatch(raw.lower()) if isinstance(raw, str) else None
    if match is None or match[2] not in _UNITS:
        raise ValueError
    return int(float(match[1]) * _UNITS[match[2]])


def trigger(raw: object) -> str:
    """As Spark wants to hear it."""
    if raw == AVAILABLE_NOW:
        return AVAILABLE_NOW
    return f"{duration(raw)} milliseconds"


def watermark(raw: object) -> Watermark:
    """`{ column = "at", delay = "1 minute" }`."""
    if not isinstance(raw, Mapping) or set(raw) != {"column", "delay"}:
        raise ValueError
    return Watermark(text(raw["column"]), f"{duration(raw['delay'])} milliseconds")


def settings(raw: object) -> dict[str, str]:
    """Names with plain values, as Spark's options and settings are: text in the end."""
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
    """Where a secret is; never the secret itself."""
    if not isinstance(raw, str) or raw.partition(":")[0] not in ("file", "env") or not raw.partition(":")[2]:
        raise ValueError
    return raw


@dataclass(frozen=True, slots=True)
class Watermark:
    """How long late rows are waited for, by which column of time."""

    column: str
    delay: str


_TOPIC = "the name of a topic"
_WAIT = 'a duration such as "10 seconds"'

PIPELINE: Final[Mapping[str, Key]] = {
    "name": Key(label, "letters, digits and . _ -", "What `list`, `status` and `stop` call it; by default the name of the file."),
    "servers": Key(text, "host:port, several with commas", "The Flight endpoint of the broker; `127.0.0.1:8815` by default."),
    "user": Key(text, "a name", "Who to log in as."),
    "password": Key(secret, '"file:PATH" or "env:NAME"', "Where the password of that user is."),
    "tls": Key(flag, "true or false", "Whether the Flight endpoint is encrypted."),
    "ca": Key(text, "the path of a file", "Whose signature on the broker's certificate to trust; implies `tls`."),
    "checkpoint": Key(text, "a directory", "Where progress and state are kept; by default `checkpoints/NAME` beside the file."),
    "trigger": Key(
        trigger,
        'a duration such as "1 second", or "available-now"',
        "How often a micro-batch begins. Without it, as soon as there is something; `available-now`: what is there, then the end.",
    ),
    "conf": Key(settings, "a table of Spark settings", 'Settings of the Spark session: `"spark.sql.shuffle.partitions" = 8`.'),
    "restart": Key(lambda raw: raw, "a table", "When a query that fails is started again; see `[pipeline.restart]`."),
}
RESTART: Final[Mapping[str, Key]] = {
    "attempts": Key(count(0), "a whole number", "How many failures of a query within `window` are borne; 10."),
    "window": Key(duration, _WAIT, "How far back failures are counted; 10 minutes."),
    "backoff": Key(duration, _WAIT, "The pause before the first restart; doubled each time; 1 second."),
    "backoff_max": Key(duration, _WAIT, "The longest pause; 1 minute."),
    "same_batch": Key(count(1), "a whole number from 1", "After how many equal failures of the same batch the pipeline gives up; 3."),
}
SOURCE: Final[Mapping[str, Key]] = {
    "topic": Key(text, _TOPIC, "The topic to read."),
    "topics": Key(texts, "a list of topics", "The topics to read, if there are several."),
    "pattern": Key(text, "a regular expression", "Read all topics whose whole name fits; new ones are found."),
    "format": Key(choice(FORMATS), f"one of {', '.join(FORMATS)}", "What the values are; `raw`, the bytes as they are, by default."),
    "schema": Key(text, 'Spark DDL such as "id long, at timestamp"', "The columns of a value. Without it, the schema the topic requires."),
    "starting": Key(
        text,
        '"earliest", "latest" or offsets as JSON',
        "Where a new pipeline begins; `earliest` by default. Afterwards its checkpoint knows.",
    ),
    "bad_records": Key(
        choice(BAD_RECORDS),
        f"one of {', '.join(BAD_RECORDS)}",
        "Where a record goes that does not parse: to the dead letters of its topic (`dlq`, the default), nowhere (`fail` the batch), "
        "or on with its columns null (`null`).",
    ),
    "expect": Key(
        settings,
        "a table of names and SQL conditions",
        'Conditions that a row has to meet; one that does not goes to the dead letters, `not met: ` and the name: `expect = { "amount is '
        'positive" = "amount > 0" }`.',
    ),
    "watermark": Key(
        watermark, '{ column = "at", delay = "1 minute" }', "How long late rows are waited for, by which column; see Spark's watermarks."
    ),
    "read": Key(
        choice(("stream", "table")), "stream or table", "`table`: what the topic holds at the start, to join with; `stream` by default."
    ),
    "options": Key(settings, "a table", "More options of the data source: `{ maxOffsetsPerTrigger = 100000 }`; see the page on Spark."),
}
STEP: Final[Mapping[str, Key]] = {
    "sql": Key(text, "a query", "Spark SQL over sources and the steps above, each a table."),
    "sql_file": Key(text, "the path of a file", "The same in a file of its own, beside this one."),
    "python": Key(
        text,
        "module:function",
        "A function that takes DataFrames and returns one; its module is beside this file, or installed.",
    ),
    "inputs": Key(texts, "names of sources and steps", "What the function takes; by default, what its parameters are called."),
    "watermark": Key(watermark, '{ column = "at", delay = "1 minute" }', "A watermark on what the step makes."),
}
SINK: Final[Mapping[str, Key]] = {
    "from": Key(name, "the name of a step or source", "Whose rows are written.", required=True),
    "kind": Key(choice(KINDS), f"one of {', '.join(KINDS)}", "What they are written to.", required=True),
    "mode": Key(
        choice(MODES),
        f"one of {', '.join(MODES)}",
        "`append`: rows that are final (the default). `update`: those that changed. `complete`: the whole result, every time.",
    ),
    "trigger": Key(trigger, 'a duration, or "available-now"', "A trigger of its own."),
    "topic": Key(text, _TOPIC, "kind topic: where to; made if it is not there. Without it, a column `topic` says where each row goes."),
    "partitions": Key(count(1), "a whole number from 1", "kind topic: how many partitions, if it has to be made; 1."),
    "key": Key(text, "a column or SQL expression", "kind topic: the key of a record."),
    "value": Key(text, "a column or SQL expression", "kind topic: the value of a record; by default the row as a JSON object."),
    "path": Key(text, "a directory", "kind delta, iceberg, parquet: where the table is; made if it is not there."),
    "table": Key(text, "namespace.table", "kind iceberg: the name of the table in the catalog; `headrace.` and the name of the sink."),
    "merge": Key(
        texts, "names of columns", "kind delta, iceberg with mode update: the key columns; a row replaces the one with the same key."
    ),
    "rows": Key(count(1), "a whole number from 1", "kind console: how many rows of a batch are shown; 20."),
}
SECTIONS: Final[Mapping[str, Mapping[str, Key]]] = {
    "pipeline": PIPELINE,
    "pipeline.restart": RESTART,
    "sources": SOURCE,
    "steps": STEP,
    "sinks": SINK,
}
