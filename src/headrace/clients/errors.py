"""Errors that only clients raise, in addition to `RecordTooLarge` and the other errors of the broker.

After `NotSent` the broker does not have the record. After `OutcomeUnknown` it may have it.
"""

from __future__ import annotations

from headrace.errors import HeadraceError


class ClientError(HeadraceError):
    """Base of the errors that only clients raise."""


class ConnectFailed(ClientError):
    """The connection failed; nothing was sent."""

    kind = "unavailable"

    def __init__(self, *, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot connect to {host}:{port}: {reason}")
        self.host, self.port, self.reason = host, port, reason


class ClientClosed(ClientError):
    """The client was closed before or during the call."""


class NotSent(ClientError):
    """The client was closed before it sent the records: the broker has never received them."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} {_records(count)} never sent")
        self.count = count


class OutcomeUnknown(ClientError):
    """The client was closed after sending and before the acknowledgement: the broker may have the records or not."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} {_records(count)} sent but not acknowledged; the outcome is unknown")
        self.count = count


class Refused(ClientError):
    """The server returned an error. `code` is that of the protocol; `kind` is the kind of error, if known."""

    kind = ""

    def __init__(self, *, code: int, text: str, kind: str = "") -> None:
        super().__init__(f"{code} {text}")
        self.code, self.text = code, text
        self.kind = kind or self.kind


class UnknownGroup(Refused):
    """No group of that name has committed an offset."""

    kind = "unknown_group"

    def __init__(self, text: str) -> None:
        super().__init__(code=1, text=text)

    def __str__(self) -> str:
        return self.text


class NotSupported(ClientError):
    """The protocol does not support the call. `instead` is the alternative."""

    def __init__(self, protocol: str, what: str, instead: str = "") -> None:
        super().__init__(f"{protocol} does not support {what}" + (f"; {instead}" if instead else ""))
        self.protocol, self.what, self.instead = protocol, what, instead


class NothingToSettle(ClientError, ValueError):
    """There is no group to commit for and no delivery that awaits an acknowledgement."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"nothing to settle on topic {topic!r}: subscribe with a group to commit to one")
        self.topic = topic


class InvalidUrl(ClientError, ValueError):
    """The URL of a broker is invalid. The text never contains a secret."""


class AlreadySubscribed(ClientError):
    """The client already follows the topic. Another client may follow it too."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"this client already follows topic {topic!r}")
        self.topic = topic


def _records(count: int) -> str:
    return "record was" if count == 1 else "records were"
