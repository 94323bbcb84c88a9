"""What a client raises, beside `RecordTooLarge` and the other words it shares with the broker.

The difference that matters after a failure is whether the broker may have kept the record: `NotSent` says it has not, `OutcomeUnknown`
says that nobody here can tell.
"""

from __future__ import annotations

from headrace.errors import HeadraceError


class ClientError(HeadraceError):
    """The root of what only clients raise."""


class ConnectFailed(ClientError):
    """No connection; nothing was sent."""

    kind = "unavailable"

    def __init__(self, *, host: str, port: int, reason: str) -> None:
        super().__init__(f"cannot connect to {host}:{port}: {reason}")
        self.host, self.port, self.reason = host, port, reason


class ClientClosed(ClientError):
    """The client was closed before or while this was asked of it."""


class NotSent(ClientError):
    """Closed before the records left: the broker has never seen them."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} {_records(count)} never sent")
        self.count = count


class OutcomeUnknown(ClientError):
    """Sent, and closed before the acknowledgement came: the broker may have kept the records or not."""

    def __init__(self, count: int) -> None:
        super().__init__(f"{count} {_records(count)} sent but not acknowledged; the outcome is unknown")
        self.count = count


class Refused(ClientError):
    """The server said no, in its own words. `code` is its protocol's; `kind`, where it is known, what kind of refusal that is."""

    kind = ""

    def __init__(self, *, code: int, text: str, kind: str = "") -> None:
        super().__init__(f"{code} {text}")
        self.code, self.text = code, text
        self.kind = kind or self.kind


class UnknownGroup(Refused):
    """No group of that name has committed anything there."""

    kind = "unknown_group"

    def __init__(self, text: str) -> None:
        super().__init__(code=1, text=text)

    def __str__(self) -> str:
        return self.text


class NotSupported(ClientError):
    """The protocol has no way to say this. `instead` is what has."""

    def __init__(self, protocol: str, what: str, instead: str = "") -> None:
        super().__init__(f"{protocol} does not support {what}" + (f"; {instead}" if instead else ""))
        self.protocol, self.what, self.instead = protocol, what, instead


class NothingToSettle(ClientError, ValueError):
    """There is no group whose progress could be committed, and no delivery that waits for an acknowledgement."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"nothing to settle on topic {topic!r}: subscribe with a group to commit to one")
        self.topic = topic


class InvalidUrl(ClientError, ValueError):
    """The address of a broker cannot be understood. Never holds a secret: those do not belong into an address."""


class AlreadySubscribed(ClientError):
    """One client follows a topic once; another client may follow it again."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"this client already follows topic {topic!r}")
        self.topic = topic


def _records(count: int) -> str:
    return "record was" if count == 1 else "records were"
