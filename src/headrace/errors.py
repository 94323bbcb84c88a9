"""What can go wrong, and whose fault it is.

`WireError` blames the peer's bytes, `BrokerError` blames the request or says what the broker cannot do right now,
`assert` blames us. Each protocol has one table that maps a `BrokerError.code` to its own words.
"""

from __future__ import annotations

from typing import ClassVar


class HeadraceError(Exception):
    """The root of everything Headrace raises on purpose."""


class WireError(HeadraceError):
    """The peer sent bytes its protocol does not allow."""


class ConfigError(HeadraceError):
    """The configuration, a flag or an environment variable is wrong; the text is one line for the user."""


class BrokerError(HeadraceError):
    """A request that cannot be served. `code` is stable and protocol-neutral; `retriable` drives client retries."""

    code: ClassVar[str] = "internal"
    retriable: ClassVar[bool] = False


class InvalidRequest(BrokerError):
    """The request contradicts itself or a rule: a bad name, a negative offset, an empty batch."""

    code = "invalid_request"


class InvalidTopicName(InvalidRequest):
    """The topic name breaks the naming rule."""

    code = "invalid_topic_name"


class LimitExceeded(BrokerError):
    """One more than a limit of `limits.py` or the configuration allows."""

    code = "limit_exceeded"


class RecordTooLarge(LimitExceeded):
    """A single record exceeds `limits.record_bytes_max`."""

    code = "record_too_large"

    def __init__(self, *, size_bytes: int, bytes_max: int) -> None:
        super().__init__(f"record of {size_bytes} bytes exceeds the limit of {bytes_max} bytes")
        self.size_bytes, self.bytes_max = size_bytes, bytes_max


class UnknownTopic(BrokerError):
    """No topic of that name."""

    code = "unknown_topic"

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} not found")
        self.topic = topic


class UnknownPartition(BrokerError):
    """The topic exists, that partition of it does not."""

    code = "unknown_partition"

    def __init__(self, topic: str, partition: int) -> None:
        super().__init__(f"topic {topic!r} has no partition {partition}")
        self.topic, self.partition = topic, partition


class TopicExists(BrokerError):
    """A topic of that name is already there."""

    code = "topic_exists"

    def __init__(self, topic: str) -> None:
        super().__init__(f"topic {topic!r} already exists")
        self.topic = topic


class OffsetOutOfRange(BrokerError):
    """The reader asks for an offset the log does not hold (yet, or any more)."""

    code = "offset_out_of_range"

    def __init__(self, *, wanted: int, first: int, end: int) -> None:
        super().__init__(f"offset {wanted} is outside [{first}, {end})")
        self.wanted, self.first, self.end = wanted, first, end


class NotAuthorized(BrokerError):
    """`authorize` said no."""

    code = "not_authorized"

    def __init__(self, *, principal: str, action: str, resource: str) -> None:
        super().__init__(f"{principal} may not {action} {resource}")
        self.principal, self.action, self.resource = principal, action, resource


class LoginFailed(BrokerError):
    """Nobody of that name with that password. One text for every reason: it must not tell which of the two was wrong."""

    code = "login_failed"

    def __init__(self) -> None:
        super().__init__("invalid username or password")


class LoginThrottled(BrokerError):
    """Too many wrong passwords; this attempt was not looked at."""

    code, retriable = "login_throttled", True

    def __init__(self, *, wait_ms: int) -> None:
        super().__init__(f"too many failed logins: try again in {-(-wait_ms // 1000)} s")
        self.wait_ms = wait_ms


class NoSuchEntry(BrokerError):
    """No user, role, rule or key of that name."""

    code = "no_such_entry"

    def __init__(self, what: str, name: str) -> None:
        super().__init__(f'{what} "{name[:60]}" not found')
        self.what, self.name = what, name


class EntryExists(BrokerError):
    """A user, role or key of that name is already there."""

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
    """No stage of that handle: there never was one, or it was published, dropped, has expired, or went with the broker's last stop."""

    code = "unknown_stage"

    def __init__(self, handle: str) -> None:
        super().__init__(f"stage {handle[:120]!r} not found")
        self.handle = handle


class StaleEpoch(BrokerError):
    """A newer run of the same writer has taken over. The one that asks has to end: whatever it would write, the newer one writes."""

    code = "stale_epoch"

    def __init__(self, *, writer: str, epoch: str, current: str) -> None:
        super().__init__(f"run {epoch[:80]!r} of {writer[:80]!r} was superseded by run {current[:80]!r}")
        self.writer, self.epoch, self.current = writer, epoch, current


class UnknownDelivery(BrokerError):
    """An ack or nack names a delivery that is not in flight."""

    code = "unknown_delivery"


class UnknownMessage(BrokerError):
    """No dead letter or delayed message of that id: there never was, or it has been replayed, delivered or cancelled."""

    code = "unknown_message"

    def __init__(self, id: str) -> None:
        super().__init__(f"message not found: {id}")
        self.id = id


class InvalidSchema(InvalidRequest):
    """The schema is not one, breaks a limit, or asks for what schemas may not do here."""

    code = "invalid_schema"


class UnknownSchema(BrokerError):
    """No schema of that name, or no such version of it."""

    code = "unknown_schema"

    def __init__(self, name: str, version: int = 0) -> None:
        super().__init__(f"schema not found: {name[:80]}" + (f" v{version}" if version else ""))
        self.name, self.version = name, version


class IncompatibleSchema(BrokerError):
    """A new version that readers or writers of an older one could not live with. `conflicts` says where and why."""

    code = "incompatible_schema"

    def __init__(self, name: str, version: int, conflicts: tuple[str, ...]) -> None:
        more = f" (and {len(conflicts) - 1} more)" if len(conflicts) > 1 else ""
        super().__init__(f"not compatible with {name[:80]} v{version}: {conflicts[0]}{more}")
        self.name, self.version, self.conflicts = name, version, conflicts


class InvalidRecord(BrokerError):
    """A record is not what the schema of its topic says. `index` counts from the first record of the run."""

    code = "invalid_record"

    def __init__(self, *, index: int, faults: tuple[str, ...], schema: str) -> None:
        where = f"record {index}: " if index else ""
        super().__init__(f"schema validation failed: {where}{'; '.join(faults)}" + (f" ({schema})" if schema else ""))
        self.index, self.faults, self.schema = index, faults, schema


class DiskFull(BrokerError):
    """No room for the write. Nothing acknowledged is harmed; try again when there is space."""

    code, retriable = "disk_full", True


class StorageFailed(BrokerError):
    """A write or sync failed; this log takes no more writes until it is opened again. Reads go on.

    The outcome of the write that met the failure is unknown: readers do not see its records now, but they may be present after the next
    start. The text says whether that is so, or whether the write came later and was not written.
    """

    code = "storage_failed"


class CorruptData(BrokerError):
    """A checksum does not match, or a format is unknown. Names the file and the position."""

    code = "corrupt_data"


class Unavailable(BrokerError):
    """The broker is starting, draining or overloaded."""

    code, retriable = "unavailable", True
