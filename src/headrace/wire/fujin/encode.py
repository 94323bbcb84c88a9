"""Encoder of Fujin messages: columns in, one block of bytes out."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

from headrace.errors import InvalidRequest
from headrace.limits import FUJIN_ERROR_BYTES_MAX
from headrace.records import Headers
from headrace.wire.fujin.frames import AUTO_COUNTLESS_BYTES_MAX, U32, ReaderKind, Reply, Request, WriteForm, is_plain_in_auto

DISCONNECT: Final = bytes((Request.DISCONNECT,))
PING: Final = bytes((Reply.PING,))
PONG: Final = bytes((Request.PONG,))
STOP: Final = bytes((Reply.STOP,))
_NO_ERROR: Final = b"\x00"
_U16: Final = struct.Struct(">H")
_FETCH: Final = struct.Struct(">B4sI")
_TWO_FIELDS: Final = struct.Struct(">BI")

# Client → server.


def connect_writer(id: int | bytes | None = None) -> bytes:
    """Return a CONNECT WRITER with a number (the specification), a text (the original client), or no id."""
    if isinstance(id, bytes):
        return bytes((Request.CONNECT_WRITER,)) + _text(id)
    return bytes((Request.CONNECT_WRITER,)) + U32.pack(id or 0)


def connect_reader(kind: ReaderKind, auto_commit: bool, name: str) -> bytes:
    return bytes((Request.CONNECT_READER, kind, auto_commit)) + _text(name.encode())


def writes(
    name: str, cids: Sequence[bytes], values: Sequence[bytes], headers: Sequence[Headers] | None = None, *, form: WriteForm = WriteForm.AUTO
) -> bytes:
    """Return one WRITE for each value. Raises `InvalidRequest` for a value that the form cannot carry."""
    field = _text(name.encode())
    parts: list[bytes] = []
    append, pack = parts.append, _write_head(len(field)).pack
    if headers is None and form is not WriteForm.ALWAYS:
        for cid, value in zip(cids, values, strict=True):
            size = len(value)
            if form is WriteForm.AUTO and size and not is_plain_in_auto(size):
                raise InvalidRequest(f"a value of {size} bytes is ambiguous with headers: use the form NEVER or ALWAYS")
            append(pack(Request.WRITE, cid, field, size))
            append(value)
        return b"".join(parts)
    start = _write_start(len(field)).pack
    for index, (cid, value) in enumerate(zip(cids, values, strict=True)):
        append(start(Request.WRITE, cid, field))
        append(_headed(headers[index] if headers is not None else (), value, form))
    return b"".join(parts)


def _headed(headers: Headers, value: bytes, form: WriteForm) -> bytes:
    """Return what follows the name in a form with headers."""
    if form is WriteForm.NEVER and headers:
        raise InvalidRequest("the form NEVER carries no headers")
    if form is WriteForm.NEVER or (form is WriteForm.AUTO and not headers and is_plain_in_auto(len(value))):
        return _text(value)
    if form is WriteForm.AUTO and not headers and len(value) > AUTO_COUNTLESS_BYTES_MAX:
        raise InvalidRequest(f"a value of {len(value)} bytes is ambiguous with headers: use the form NEVER or ALWAYS")
    parts = [_U16.pack(2 * len(headers))]
    for name, content in headers:
        parts += (_text(name.encode()), _text(content))
    parts.append(_text(value))
    return b"".join(parts)


def transact(request: Request, cid: bytes) -> bytes:
    """Return a BEGIN, COMMIT or ROLLBACK."""
    return bytes((request,)) + cid


def fetch(cid: bytes, count: int) -> bytes:
    return _FETCH.pack(Request.FETCH, cid, count)


def settle(request: Request, cid: bytes, ids: Sequence[bytes]) -> bytes:
    """Return an ACK or NACK."""
    parts = [_FETCH.pack(request, cid, len(ids))]
    for id in ids:
        parts += (U32.pack(len(id)), id)
    return b"".join(parts)


# Server → client.


def reader_connected(error: str | None = None) -> bytes:
    return bytes((Reply.READER,)) + _error(error)


def written(cids: Iterable[bytes]) -> bytes:
    """Return one successful reply for each WRITE."""
    reply = bytes((Reply.WRITE,))
    return reply + (_NO_ERROR + reply).join(cids) + _NO_ERROR


def write_failed(cids: Iterable[bytes], error: str) -> bytes:
    """Return the same error for each WRITE."""
    reply, rest = bytes((Reply.WRITE,)), _error(error)
    return b"".join([reply + cid + rest for cid in cids])


def answered(reply: Reply, cid: bytes, error: str | None = None) -> bytes:
    """Return the reply to a step of a transaction, or the error of a FETCH, ACK or NACK."""
    return bytes((reply,)) + cid + _error(error)


def messages(ids: Sequence[bytes] | None, values: Sequence[bytes]) -> bytes:
    """Return one MSG for each value."""
    if ids is None:
        sizes = set(map(len, values))
        if len(sizes) == 1:
            head = _TWO_FIELDS.pack(Reply.MSG, sizes.pop())
            return head + head.join(values)
        pack = _TWO_FIELDS.pack
        return b"".join([part for value in values for part in (pack(Reply.MSG, len(value)), value)])
    parts: list[bytes] = []
    for id, value in zip(ids, values, strict=True):
        parts += (_TWO_FIELDS.pack(Reply.MSG, len(id)), id, U32.pack(len(value)), value)
    return b"".join(parts)


def fetched(cid: bytes, ids: Sequence[bytes] | None, values: Sequence[bytes]) -> bytes:
    pack = U32.pack
    parts = [bytes((Reply.FETCH,)), cid, _NO_ERROR, pack(len(values))]
    if ids is None:
        for value in values:
            parts += (pack(len(value)), value)
    else:
        for id, value in zip(ids, values, strict=True):
            parts += (pack(len(id)), id, pack(len(value)), value)
    return b"".join(parts)


def settled(reply: Reply, cid: bytes, ids: Sequence[bytes], errors: Sequence[str | None]) -> bytes:
    pack = U32.pack
    parts = [bytes((reply,)), cid, _NO_ERROR, pack(len(ids))]
    for id, error in zip(ids, errors, strict=True):
        parts += (pack(len(id)), id, _error(error))
    return b"".join(parts)


def _error(error: str | None) -> bytes:
    """Encode an error. It always has a text: clients treat a text of length 0 as a broken stream."""
    if error is None:
        return _NO_ERROR
    raw = (error or "failed").encode()
    if len(raw) > FUJIN_ERROR_BYTES_MAX:
        raw = raw[:FUJIN_ERROR_BYTES_MAX].decode(errors="ignore").encode()
    return b"\x01" + _text(raw)


def _text(raw: bytes) -> bytes:
    return U32.pack(len(raw)) + raw


@lru_cache(maxsize=256)
def _write_head(field_bytes: int) -> struct.Struct:
    return struct.Struct(f">B4s{field_bytes}sI")


@lru_cache(maxsize=256)
def _write_start(field_bytes: int) -> struct.Struct:
    return struct.Struct(f">B4s{field_bytes}s")
