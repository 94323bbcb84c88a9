"""Records and receipts as text: for people, for `jq`, or the bytes as they are."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Final

from headrace.cli import one_line
from headrace.clients.messages import MessageBatch, Receipt

OUTPUTS: Final = ("raw", "json", "jsonl", "hex", "table")
OUTPUTS_TEXT: Final = "raw: the value and a line end. json, jsonl: an object a line. hex: the value in hexadecimal. table: for people."
TABLE_HEAD: Final = f"{'PARTITION':>9}  {'OFFSET':>10}  {'KEY':<16}  VALUE\n"


def printed(batch: MessageBatch, count: int, output: str) -> bytes:
    """The first `count` records, a line for each; a raw value may itself have several."""
    if output == "raw":
        return b"\n".join(batch.values[:count]) + b"\n" if count else b""
    if output == "hex":
        return "".join(f"{value.hex()}\n" for value in batch.values[:count]).encode()
    if output == "table":
        return "".join(_row(batch, index) for index in range(count)).encode()
    return "".join(f"{compact(fields(batch, index))}\n" for index in range(count)).encode()


def fields(batch: MessageBatch, index: int) -> dict[str, object]:
    """The value as JSON if it is JSON, as text if it is text, else in base64 and marked so; the key as text or base64."""
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
    """An object a line; what the protocol does not tell is null."""
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
    """What the text says as JSON; itself if that is nothing, or nothing that could be printed again."""
    try:
        plain = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(plain, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # half a surrogate pair, a nesting without end
        return text
    return plain


def _refuse_constant(name: str) -> None:
    """NaN and Infinity are no JSON, though Python's parser takes them."""
    raise ValueError(name)
