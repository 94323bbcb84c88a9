"""Output formats of records and receipts."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Final

from headrace.cli import one_line
from headrace.clients.messages import MessageBatch, Receipt

OUTPUTS: Final = ("raw", "json", "jsonl", "hex", "table")
OUTPUTS_TEXT: Final = (
    "raw: the value and a newline. json, jsonl: one object per line. hex: the value in hexadecimal. table: aligned columns."
)
TABLE_HEAD: Final = f"{'PARTITION':>9}  {'OFFSET':>10}  {'KEY':<16}  VALUE\n"


def printed(batch: MessageBatch, count: int, output: str) -> bytes:
    """Return the first `count` records, one per line. A raw value may contain newlines."""
    if output == "raw":
        return b"\n".join(batch.values[:count]) + b"\n" if count else b""
    if output == "hex":
        return "".join(f"{value.hex()}\n" for value in batch.values[:count]).encode()
    if output == "table":
        return "".join(_row(batch, index) for index in range(count)).encode()
    return "".join(f"{compact(fields(batch, index))}\n" for index in range(count)).encode()


def fields(batch: MessageBatch, index: int) -> dict[str, object]:
    """Return the fields of a record: the value as JSON, text or marked base64, the key as text or marked base64."""
    key = None if batch.keys is None else batch.keys[index]
    found: dict[str, object] = {
        "topic": batch.topic,
        "partition": batch.partition,
        "offset": batch.offsets[index] if batch.offsets else None,
        "key": None,
    }
    if key is not None:
        try:
            found["key"] = key.decode()
        except UnicodeDecodeError:
            found |= {"key": base64.b64encode(key).decode(), "key_encoding": "base64"}
    value = batch.values[index]
    try:
        found["value"] = _as_plain(value.decode())
    except UnicodeDecodeError:
        found |= {"value": base64.b64encode(value).decode(), "encoding": "base64"}
    return found


def receipts(made: Sequence[Receipt]) -> bytes:
    """Return receipts as one JSON object per line. Fields that the protocol does not report are null."""
    return "".join(
        compact({"topic": at.topic, "partition": at.partition, "offset": at.offset, "timestamp": at.timestamp}) + "\n" for at in made
    ).encode()


def compact(plain: object) -> str:
    return json.dumps(plain, ensure_ascii=False, separators=(",", ":"))


def _row(batch: MessageBatch, index: int) -> str:
    message = batch.message(index)
    partition, offset = ("-" if number is None else str(number) for number in (message.partition, message.offset))
    key = "-" if message.key is None else _visible(message.key)
    return f"{partition:>9}  {offset:>10}  {key:<16}  {_visible(message.value)}\n"


def _visible(content: bytes) -> str:
    return one_line(content.decode("utf-8", "backslashreplace"))


def _as_plain(text: str) -> object:
    """Return the parsed JSON, or the text if it is not JSON or cannot be encoded again."""
    try:
        plain = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(plain, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half a surrogate pair, or too deep a nesting
        return text
    return plain


def _refuse_constant(name: str) -> None:
    """Reject NaN and Infinity, which are not JSON although Python's parser accepts them."""
    raise ValueError(name)
