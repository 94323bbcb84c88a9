"""Exceptions, by cause.

`WireError` is for invalid bytes of a peer, `BrokerError` for a request that is invalid or cannot be served now, `assert` for our own
defects. Each protocol has one table that maps `BrokerError.code` to its own error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import asyncio


class HeadraceError(Exception):
    """Base class of all exceptions that Headrace raises."""


class WireError(HeadraceError):
    """The peer sent bytes that its protocol does not allow."""


class ConfigError(HeadraceError):
    """The configuration, an option or an environment variable is invalid. The message is one line for the user."""


class BrokerError(HeadraceError):
    """A request cannot be served. `code` is stable and independent of the protocol; clients retry if `retriable` is set."""

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False


class InvalidRequest(BrokerError):
    """The request is contradictory or breaks a rule, for example a bad name, a negative offset or an empty batch."""

    code = "invalid_request"


class InvalidTopicName(InvalidRequest):
    """The topic name breaks the naming rule."""

    code = "invalid_topic_name"


class GroupHasMembers(InvalidRequest):
    """The group cannot be changed while members consume on its behalf."""

    code = "group_has_members"

    def __init__(self, group: str, members: int) -> None:
        active = "1 active member; stop it" if members == 1 else f"{members} active members; stop them"
        super().__init__(f"group {group!r} has {active}, or give --force")
        self.group, self.members = group, members


class LimitExceeded(BrokerError):
    """A limit of `limits.py` or of the configuration is exceeded."""

    code = "limit_exceeded"


class RecordTooLarge(LimitExceeded):
    """A single record exceeds `limits.record_bytes_max`."""

    code = "record_too_large"

    def __init__(self, *, size_bytes: int, bytes_max: int) -> None:
        super().__init__(f"record of {size_bytes} bytes exceeds the limit of {bytes_max} bytes")
        self.size_bytes, self.bytes_max = size_bytes, bytes_max


class UnknownTopic(BrokerError):
    """The topic does not exist."""

    code = "unknown_topic"

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} not found")
        self.topic = topic


class UnknownPartition(BrokerError):
    """The topic exists and has no such partition."""

    code = "unknown_partition"

    def __init__(self, topic: str, partition: int) -> None:
        super().__init__(f"topic {topic!r} has no partition {partition}")
        self.topic, self.partition = topic, partition


class TopicExists(BrokerError):
    """A topic of that name exists."""

    code = "topic_exists"

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} already exists")
        self.topic = topic


class OffsetOutOfRange(BrokerError):
    """The offset is below the first or above the end of the partition."""

    code = "offset_out_of_range"

    def __init__(self, *, wanted: int, first: int, end: int) -> None:
        super().__init__(f"offset {wanted} is outside [{first}, {end})")
        self.wanted, self.first, self.end = wanted, first, end


class NotAuthorized(BrokerError):
    """The principal lacks the permission."""

    code = "not_authorized"

    def __init__(self, *, principal: str, action: str, resource: str) -> None:
        super().__init__(f"{principal} may not {action} {resource}")
        self.principal, self.action, self.resource = principal, action, resource


class LoginFailed(BrokerError):
    """The user name or the password is wrong. The message must not reveal which one."""

    code = "login_failed"

    def __init__(self) -> None:
        super().__init__("invalid username or password")


class LoginThrottled(BrokerError):
    """Too many wrong passwords. The password of this attempt was not checked."""

    code, retriable = "login_throttled", True

    def __init__(self, *, wait_ms: int) -> None:
        super().__init__(f"too many failed logins: try again in {-(-wait_ms // 1000)} s")
        self.wait_ms = wait_ms


class NoSuchEntry(BrokerError):
    """The user, role, rule or key does not exist."""

    code = "no_such_entry"

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f'{what} "{name[:60]}" not found')
        self.what, self.name = what, name


class EntryExists(BrokerError):
    """A user, role or key of that name exists."""

    code = "entry_exists"

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f'{what} "{name[:60]}" already exists')
        self.what, self.name = what, name


class OutOfSequence(BrokerError):
    """An idempotent producer skipped a sequence number or resent one the broker no longer remembers."""

    code = "out_of_sequence"

    def __init__(self, *, producer: str, wanted: int, got: int) -> None:
        super().__init__(f"producer {producer}: expected sequence {wanted}, got {got}")
        self.producer, self.wanted, self.got = producer, wanted, got


class InvalidTransaction(BrokerError):
    """The transaction is unknown, already ended, timed out or too large."""

    code = "invalid_transaction"


class UnknownStage(BrokerError):
    """The stage does not exist: it was never created, or was published, dropped or has expired, or the broker restarted."""

    code = "unknown_stage"

    def __init__(self, handle: str) -> None:
        super().__init__(f"stage {handle[:120]!r} not found")
        self.handle = handle


class StaleEpoch(BrokerError):
    """A newer epoch of the same writer exists. The older instance must stop, because the newer one writes the same data."""

    code = "stale_epoch"

    def __init__(self, *, writer: str, epoch: str, current: str) -> None:
        super().__init__(f"epoch {epoch[:80]!r} of {writer[:80]!r} was superseded by epoch {current[:80]!r}")
        self.writer, self.epoch, self.current = writer, epoch, current


class UnknownDelivery(BrokerError):
    """An ack or nack names a delivery that is not in flight."""

    code = "unknown_delivery"


class UnknownMessage(BrokerError):
    """The dead letter or delayed message does not exist: it was never created, or has been replayed, delivered or cancelled."""

    code = "unknown_message"

    def __init__(self, id: str) -> None:
        super().__init__(f"message not found: {id}")
        self.id = id


class InvalidSchema(InvalidRequest):
    """The definition is invalid, exceeds a limit or uses an unsupported feature."""

    code = "invalid_schema"


class UnknownSchema(BrokerError):
    """The schema or that version of it does not exist."""

    code = "unknown_schema"

    def __init__(self, name: str, version: int = 0) -> None:
        super().__init__(f"schema not found: {name[:80]}" + (f" v{version}" if version else ""))
        self.name, self.version = name, version


class IncompatibleSchema(BrokerError):
    """The new version is incompatible with an older one. `conflicts` lists where and why."""

    code = "incompatible_schema"

    def __init__(self, name: str, version: int, conflicts: tuple[str, ...]) -> None:
        more = f" (and {len(conflicts) - 1} more)" if len(conflicts) > 1 else ""
        super().__init__(f"not compatible with {name[:80]} v{version}: {conflicts[0]}{more}")
        self.name, self.version, self.conflicts = name, version, conflicts


class InvalidRecord(BrokerError):
    """A record does not match the schema of its topic. `index` is its index in the batch."""

    code = "invalid_record"

    def __init__(self, *, index: int, faults: tuple[str, ...], schema: str) -> None:
        where = f"record {index}: " if index else ""
        super().__init__(f"schema validation failed: {where}{'; '.join(faults)}" + (f" ({schema})" if schema else ""))
        self.index, self.faults, self.schema = index, faults, schema


class DiskFull(BrokerError):
    """The disk has no room for the write. Acknowledged records are safe. Retry when there is space."""

    code, retriable = "disk_full", True


class StorageFailed(BrokerError):
    """A write or sync failed. The log accepts no writes until it is opened again; reads continue.

    The outcome of the write that failed is unknown: readers do not see its records now, but they may be present after the next start.
    The message tells this case from a later write, which was not written.
    """

    code = "storage_failed"


class AppendUnknown(BrokerError):
    """The log did not answer in time: the records may be written now, later or never.

    A client that repeats the request may write the records twice, unless it is an idempotent producer or an exactly-once writer: those
    repeat it safely. `outcome` resolves as the append would have, once the log has answered; None: the log will not answer.
    """

    code, retriable = "outcome_unknown", True

    def __init__(self, text: str, outcome: asyncio.Future[Any] | None = None) -> None:
        super().__init__(f"{text}; the outcome is unknown")
        self.text, self.outcome = text, outcome


class CorruptData(BrokerError):
    """A checksum does not match, or a format is unknown. The message names the file and the position."""

    code = "corrupt_data"


class Unavailable(BrokerError):
    """The broker is starting, draining or overloaded."""

    code, retriable = "unavailable", True


class NotCoordinator(Unavailable):
    """The operation needs the coordinator: the broker that owns the tables. `address` is where it listens; empty if unknown."""

    code = "not_coordinator"
    TEXT: ClassVar[str] = "this operation needs the coordinator"
    """Begins the message. Clients of protocols without error codes look for it."""

    def __init__(self, address: str = "") -> None:
        super().__init__(f"{self.TEXT}, which is at {address}" if address else f"{self.TEXT}, which is not known yet; try again")
        self.address = address
