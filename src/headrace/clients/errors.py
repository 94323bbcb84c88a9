"""Errors that only clients raise, in addition to `RecordTooLarge` and the other errors of the broker.

After `NotSent` the broker does not have the record. After `OutcomeUnknown` it may have it.
"""

from __future__ import annotations

from headrace.errors import HeadraceError


class ClientError(HeadraceError):
    """Base of the errors that only clients raise."""


class InvalidArgument(ClientError, TypeError, ValueError):
    """An argument has a wrong type or value. The text names the argument, what was expected and what was given."""


class ConnectFailed(ClientError):
    """The connection failed; nothing was sent. `reason` names the likely cause."""

    kind = "unavailable"

    def __init__(self, *, host: str, port: int, reason: str, was_accepted: bool = False) -> None:
        super().__init__(f"cannot connect to {host}:{port}: {reason}")
        self.host, self.port, self.reason = host, port, reason
        self.was_accepted = was_accepted
        """Whether the server accepted the connection and then closed it."""


class LoginRefused(ConnectFailed):
    """The server rejected the user name, the password or the API key."""

    kind = "not_authorized"


class RefusedRepeatedly(ClientError):
    """The server closed one connection after the other without serving a request, and the client gave up.

    Requests that were sent may have been executed.
    """

    kind = "refused_repeatedly"

    def __init__(self, *, host: str, port: int, count: int, reason: str) -> None:
        super().__init__(
            f"{host}:{port} ended {count} connections in a row without serving a request (the last: {reason}). Likely reasons: not logged "
            "in or not allowed, an unknown topic, or another protocol on this port; the log of the broker has the reason"
        )
        self.host, self.port, self.count, self.reason = host, port, count, reason


class ClientClosed(ClientError):
    """The client was closed before or during the call."""


class NotSent(ClientError):
    """The client was closed, or the deadline passed, before it sent the records: the broker never receives them."""

    def __init__(self, count: int, why: str = "") -> None:
        super().__init__(f"{count} {_records(count)} never sent" + (f": {why}" if why else ""))
        self.count = count


class OutcomeUnknown(ClientError):
    """The client was closed, or the deadline passed, between sending and acknowledgement: the broker may have the records or not."""

    def __init__(self, count: int, why: str = "") -> None:
        super().__init__(f"{count} {_records(count)} sent but not acknowledged; the outcome is unknown" + (f": {why}" if why else ""))
        self.count = count


class RecordRefused(ClientError):
    """The broker refused a record of `publish_many` or `send_many`. `failure` is its error, also as the cause."""

    def __init__(self, *, index: int, kept: int, failure: HeadraceError) -> None:
        super().__init__(f"record {index} was refused: {failure}; {kept} {'record was' if kept == 1 else 'records were'} kept")
        self.index, self.kept, self.failure = index, kept, failure
        self.kind = getattr(failure, "kind", "") or getattr(failure, "code", "")
        self.__cause__ = failure


class Refused(ClientError):
    """The server returned an error. `code` is that of the protocol; `kind` is the kind of error, if known."""

    kind = ""

    def __init__(self, *, code: int, text: str, kind: str = "") -> None:
        # 0 and 1 stand for any error; other codes say which.
        super().__init__(text if code in (0, 1) else f"{code} {text}")
        self.code, self.text = code, text
        self.kind = kind or self.kind


class UnknownGroup(Refused):
    """No group of that name has committed an offset."""

    kind = "unknown_group"

    def __init__(self, text: str) -> None:
        super().__init__(code=1, text=text)


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
