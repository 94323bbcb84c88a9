"""Error texts of Fujin. Those of the original are kept word for word, because its clients compare some of them."""

from __future__ import annotations

from typing import Final

from headrace.errors import BrokerError

WRITER_NOT_FOUND: Final = "writer not found"
READER_NOT_FOUND: Final = "reader not found"
INVALID_READER_TYPE: Final = "invalid reader type"
NO_FETCH_COUNT: Final = "fetch arg not provided"
INVALID_TX_STATE: Final = "invalid tx state"
NOT_SUPPORTED: Final = "not supported"
FENCED: Final = "writer fenced: another writer has connected with its id"
UNKNOWN_MESSAGE: Final = "unknown message id: settled already, delivered to another reader, or never sent on this stream"


def text(error: BrokerError, not_found: str) -> str:
    """Return the text for an error of the broker. An unknown topic means that no connector has the name."""
    return not_found if error.code == "unknown_topic" else f"{error.code}: {error}"
