"""Output formats of records and receipts."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from headrace.cli import one_line
from headrace.cli.rows import moment
from headrace.clients.messages import Message, Receipt
from headrace.records import Headers

OUTPUTS: Final = ("raw", "json", "jsonl", "hex", "table")
OUTPUTS_TEXT: Final = (
    "raw: the value and a newline. json, jsonl: one object per line; a value that is an object, array, number or boolean of JSON and "
    "would not change is printed as such, any other value as text or base64, and timestamp is Unix ms. hex: the value in hexadecimal. "
    "table: aligned columns, times in UTC."
)
FORMAT_TEXT: Final = (
    "Print each record with this template, as kcat -f: %t topic, %p partition, %o offset, %k key, %s value, %h headers, %T timestamp "
    r"(Unix ms), %K and %S size of key and value in bytes (-1: none), %% a percent sign, \n newline, \t tab. Adds no newline."
)
_TIME_WIDTH: Final = len("2026-11-15T07:49:00.000Z")


@dataclass(frozen=True, slots=True)
class PrintedRecord:
    """One record as received. Fields that the protocol does not carry are None or empty."""

    topic: str
    partition: int | None
    offset: int | None
    value: bytes | None
    """None: a tombstone."""
    key: bytes | None = None
    headers: Headers = ()
    timestamp: int | None = None

    @classmethod
    def of(cls, message: Message) -> PrintedRecord:
        return cls(message.topic, message.partition, message.offset, message.value, message.key, message.headers, message.timestamp)


def printed(records: Sequence[PrintedRecord], output: str) -> bytes:
    """Return the records, one per line. A raw value may contain newlines."""
    if output == "raw":
        return b"".join([b"%b\n" % (record.value or b"") for record in records])
    if output == "hex":
        return "".join(f"{(record.value or b'').hex()}\n" for record in records).encode()
    if output == "table":
        return "".join(map(_row, records)).encode()
    return "".join(f"{compact(fields(record))}\n" for record in records).encode()


def table_head() -> bytes:
    names = f"{'TOPIC':<16}  {'PARTITION':>9}  {'OFFSET':>10}  {'TIME':<{_TIME_WIDTH}}  {'KEY':<16}  VALUE\n"
    return names.encode()


def fields(record: PrintedRecord) -> dict[str, object]:
    """Return the fields of a record for JSON. `headrace pub --jsonl` reads them."""
    found: dict[str, object] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key": None,
    }
    if record.key is not None:
        try:
            found["key"] = record.key.decode()
        except UnicodeDecodeError:
            found |= {"key": _base64(record.key), "key_encoding": "base64"}
    found["headers"] = [[name, _text_or_base64(value)] for name, value in record.headers]
    if record.value is None:
        return found | {"value": None}
    try:
        return found | {"value": exact(record.value.decode())}
    except UnicodeDecodeError:
        return found | {"value": _base64(record.value), "encoding": "base64"}


def receipts(made: Sequence[Receipt]) -> bytes:
    """Return receipts as one JSON object per line. Fields that the protocol does not report are null."""
    return "".join(
        compact({"topic": at.topic, "partition": at.partition, "offset": at.offset, "timestamp": at.timestamp}) + "\n" for at in made
    ).encode()


def compact(plain: object) -> str:
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def exact(text: str) -> object:
    """Return the parsed JSON if printing it again says the same, else the text.

    Numbers such as 1.10, repeated names, NaN, half a surrogate pair and too deep a nesting would change. A string of JSON stays text with
    its quotes, and null stays text, so that a reader can tell them from text and from a record without a value.
    """
    try:
        plain = json.loads(text, parse_constant=_refuse, parse_float=_exact_float, parse_int=_exact_int, object_pairs_hook=_exact_object)
        json.dumps(plain, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return text
    return text if plain is None or isinstance(plain, str) else plain


def _refuse(text: str) -> object:
    raise ValueError(text)


def _exact_float(text: str) -> float:
    number = float(text)
    return number if repr(number) == text else _refuse(text)  # type: ignore[return-value]  # it never returns


def _exact_int(text: str) -> int:
    number = int(text)
    return number if str(number) == text else _refuse(text)  # type: ignore[return-value]  # it never returns


def _exact_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is repeated")
    return found


def _row(record: PrintedRecord) -> str:
    partition, offset = ("-" if number is None else str(number) for number in (record.partition, record.offset))
    at = "-" if record.timestamp is None else moment(record.timestamp)
    key, value = ("-" if content is None else _visible(content) for content in (record.key, record.value))
    return f"{record.topic:<16}  {partition:>9}  {offset:>10}  {at:<{_TIME_WIDTH}}  {key:<16}  {value}\n"


def _visible(content: bytes) -> str:
    return one_line(content.decode("utf-8", "backslashreplace"))


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _text_or_base64(content: bytes) -> object:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": _base64(content)}
