"""Error encoding of the Flight endpoint: a Flight error whose extra bytes hold the code, the text and the fields.

Any Flight client gets the matching kind of error with a readable text. `FlightClient` raises the error that the broker raised.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from typing import Any, Final

from pyarrow import flight

from headrace.errors import BrokerError, LoginFailed, LoginThrottled, NotAuthorized, Unavailable

_CODES_OUTSIDE: Final = {BrokerError.code: BrokerError}
_TEXT_BYTES_MAX: Final = 1_000
_FIELD_BYTES_MAX: Final = 500
"""gRPC sends the error in the trailers of a call, three times as long if it is not ASCII. A peer accepts 8 KiB of trailers and drops a
longer error entirely."""
_SCALARS: Final = (str, int, bool, type(None))


def _subclasses(kind: type[BrokerError]) -> Iterator[type[BrokerError]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _by_code(code: str) -> type[BrokerError]:
    return next((kind for kind in _subclasses(BrokerError) if kind.code == code), _CODES_OUTSIDE.get(code, BrokerError))


def _fields(kind: type[BrokerError]) -> list[str]:
    """Return the names of the fields of an error class, without its text."""
    if kind.__init__ is BrokerError.__init__:
        return []
    return [name for name in inspect.signature(kind).parameters if name not in ("args", "kwargs")]


def flight_error(error: BrokerError, durable: int | None = None) -> flight.FlightError:
    """Encode an error. `durable` is the number of records of a failed put that are durable."""
    fields = {name: value for name in _fields(type(error)) if isinstance(value := getattr(error, name, None), _SCALARS)}
    fields = {name: _short(value, _FIELD_BYTES_MAX) if isinstance(value, str) else value for name, value in fields.items()}
    text = _short(str(error), _TEXT_BYTES_MAX)
    if durable is not None:
        text = f"{text} ({durable} records of the put are durable)"
        fields["durable_records"] = durable
    extra = json.dumps({"code": error.code, "text": text, "fields": fields}, ensure_ascii=False).encode(errors="replace")
    words = f"{error.code}: {text}"
    if isinstance(error, NotAuthorized):
        return flight.FlightUnauthorizedError(words, extra)
    if isinstance(error, LoginFailed | LoginThrottled):
        return flight.FlightUnauthenticatedError(words, extra)
    if isinstance(error, Unavailable):
        return flight.FlightUnavailableError(words, extra)
    return flight.FlightServerError(words, extra)


def _short(text: str, bytes_max: int) -> str:
    raw = text.encode(errors="replace")
    return text if len(raw) <= bytes_max else raw[:bytes_max].decode(errors="ignore") + "…"


def broker_error(failure: flight.FlightError) -> BrokerError | None:
    """Decode the error of the broker; None if the failure has another origin."""
    try:
        carried: dict[str, Any] = json.loads(failure.extra_info)
        code, text, fields = str(carried["code"]), str(carried["text"]), dict(carried["fields"])
    except (ValueError, KeyError, TypeError):
        return None
    kind = _by_code(code)
    # Without its constructor, which would format the text from fields that an older server may not send.
    error = kind.__new__(kind)
    BrokerError.__init__(error, text)
    for name in (*_fields(kind), "durable_records"):
        if name in fields:
            setattr(error, name, fields[name])
    return error
