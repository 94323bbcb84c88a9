"""Publish a message, or publish one again after editing it."""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

from starlette.responses import Response

from headrace.clients.flymq.client import FlyMqClient
from headrace.console.reading import read_one
from headrace.console.visits import BadForm, Form, Visit
from headrace.errors import HeadraceError, InvalidRequest, UnknownMessage

_EDITABLE_BYTES_MAX: Final = 1 << 20
"""Larger values are not loaded into a form."""


def _text(content: bytes) -> tuple[str, str]:
    """Return the content and its encoding in the form. A browser normalizes line ends, so carriage returns need base64."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return base64.b64encode(content).decode(), "base64"
    return (base64.b64encode(content).decode(), "base64") if "\r" in text or "\0" in text else (text, "text")


def _bytes(text: str, encoding: str, what: str) -> bytes:
    if encoding == "base64":
        try:
            return base64.b64decode("".join(text.split()), validate=True)
        except (ValueError, binascii.Error):
            raise BadForm(f"{what}: not base64") from None
    return text.replace("\r\n", "\n").encode("utf-8", "surrogatepass")


def _headers(text: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for line in text.splitlines():
        if line.strip():
            name, colon, value = line.partition(":")
            if not colon or not name.strip():
                raise BadForm(f"headers: {line[:60]!r} is not NAME: VALUE")
            found.append((name.strip(), value.strip().encode()))
    return found


def _b64(content: bytes) -> str:
    return base64.b64encode(content).decode()


async def _fields(visit: Visit) -> dict[str, str]:
    """Return the fields of the form: empty, or those of the message to publish again."""
    blank = {"key": "", "key_encoding": "text", "value": "", "encoding": "text", "headers": "", "partition": ""}
    if not visit.given("offset"):
        return blank
    topic, partition, offset = visit.given("from") or visit.given("topic"), visit.number("partition", 0), visit.number("offset", 0)
    record = await visit.ask(read_one(visit.client, topic, partition, offset))
    if record is None:
        raise UnknownMessage(f"{topic}, partition {partition}, offset {offset}")
    if len(record.value or b"") > _EDITABLE_BYTES_MAX:
        raise InvalidRequest(f"the value has {len(record.value or b''):,} bytes: too large for a form; use headrace fetch and headrace pub")
    value, encoding = _text(record.value or b"")
    key, key_encoding = _text(record.key or b"")
    headers = "\n".join(
        f"{name}: {content.decode(errors='replace')}" for name, content in record.headers if not name.startswith("x-headrace-")
    )
    return blank | {"key": key, "key_encoding": key_encoding, "value": value, "encoding": encoding, "headers": headers}


async def send(client: FlyMqClient, topic: str, record: dict[str, object], partition: int | None) -> Any:
    """Publish one record. Raises the broker's error if it is refused."""
    reply = await client.call("record.publish", topic=topic, records=[record], partition=partition)
    if reply["refused"]:
        raise HeadraceError(reply["refused"])
    return reply["placed"][0]


async def publish(visit: Visit) -> Response:
    topic = visit.given("topic")
    fields = await _fields(visit)
    error, command = "", visit.command("pub", topic or "TOPIC", "MESSAGE", "--key", "KEY", "--header", "NAME=VALUE")
    if visit.request.method == "POST":
        form = await visit.form()
        topic = form["topic"].strip()
        fields = {name: form[name] for name in fields}
        try:
            record, partition, command = _record(visit, topic, form)
            placed: list[int] = []

            async def work() -> None:
                placed.extend(await send(visit.client, topic, record, partition))

            if await visit.act(f"Publish to {topic}", command, work(), note=lambda _: f"partition {placed[0]}, offset {placed[1]}"):
                return visit.go("/message", topic=topic, partition=placed[0], offset=placed[1])
            error = visit.login.notices.pop().text
        except BadForm as failure:
            error = str(failure)
    return visit.show("publish.html", 400 if error else 200, topic=topic, fields=fields, error=error, command=command)


def _record(visit: Visit, topic: str, form: Form) -> tuple[dict[str, object], int | None, str]:
    """Return the record, its partition and the equivalent command."""
    key = _bytes(form["key"], form["key_encoding"], "key") if form["key"] else None
    is_tombstone = form["encoding"] == "tombstone"
    value = None if is_tombstone else _bytes(form["value"], form["encoding"], "value")
    headers, partition = _headers(form["headers"]), form.number("partition")
    is_short = value is not None and form["encoding"] == "text" and form["key_encoding"] == "text" and len(value) <= 200
    words: list[object] = ["pub", topic, *([form["value"]] if is_short else ["--jsonl", "--file", "record.jsonl"])]
    if is_short:
        words += ["--key", form["key"][:200]] if key is not None else []
        words += [word for name, content in headers for word in ("--header", f"{name}={content.decode(errors='replace')}")]
    words += [] if partition is None else ["--partition", partition]
    record: dict[str, object] = {
        "value": None if value is None else _b64(value),
        "key": None if key is None else _b64(key),
        "headers": [[name, _b64(content)] for name, content in headers],
    }
    return record, partition, visit.command(*words)
