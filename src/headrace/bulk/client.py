"""The bulk lane from the other side: topics as Arrow record batches, in plain blocking calls. Safe to share between threads.

What the broker raises is raised here as the same class. A broker that does not answer is asked again a few times, where asking twice does
no harm: reading goes on behind the last row that came, appending is never repeated.
"""

from __future__ import annotations

import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pyarrow as pa
from pyarrow import flight

from headrace.bulk import request
from headrace.bulk.fault import broker_error
from headrace.bulk.request import ALL, DEFAULT_PORT, READ_SCHEMA, STORED, TIMESTAMP_TYPE, encode
from headrace.errors import BrokerError, InvalidRequest, LoginFailed, Unavailable

__all__ = [
    "ALL",
    "READ_SCHEMA",
    "Appended",
    "BulkClient",
    "PartitionState",
    "Publication",
    "Servers",
    "StageSize",
    "TopicSchema",
    "TopicState",
]

_ATTEMPTS: Final = 4
_BACKOFF_SECONDS: Final = 0.25
"""Before the second attempt, and three times as long before each further one: a broker that is started again is back by then."""
_PUBLISH_SECONDS: Final = 600.0
"""A publication larger than memory takes its time, and giving up does not make it faster."""
_PING_MS: Final = 360_000
"""A server of gRPC takes a ping every five minutes on a line where nothing else moves, and ends the line of whoever sends more: a task that
takes three minutes from one batch to the next lost its put to pings every 30 seconds."""
_OPTIONS: Final = [
    ("grpc.keepalive_time_ms", _PING_MS),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
_LINE_FAILURES: Final = (flight.FlightUnavailableError, flight.FlightTimedOutError)


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the broker is and who asks. The addresses are tried in order until one answers."""

    addresses: tuple[str, ...]
    user: str = ""
    password: str = field(default="", repr=False)
    """Of the user; without a user, an API key."""
    tls: bool = False
    ca_file: str = ""
    server_name: str = ""
    """What the certificate is to say, if not the host of the address."""
    timeout_seconds: float = 30.0
    certificate_file: str = ""
    """With `key_file`, what the client shows of itself where the broker asks for certificates."""
    key_file: str = ""

    @classmethod
    def parse(cls, text: str, **more: Any) -> Servers:
        """`host:port,host:port`; without a port it is 8815, and `grpc+tls://` before one means TLS. Raises `InvalidRequest`."""
        addresses: list[str] = []
        for part in filter(None, map(str.strip, text.split(","))):
            scheme, found, rest = part.rpartition("://")
            if found and scheme not in ("grpc", "grpc+tcp", "grpc+tls"):
                raise InvalidRequest(f"{part!r}: {scheme}:// is not spoken here; expected HOST:PORT")
            if scheme == "grpc+tls":
                more["tls"] = True
            addresses.append(_address(rest))
        if not addresses:
            raise InvalidRequest(f"{text!r} names no server; expected HOST:PORT")
        return cls(tuple(addresses), **more)


def _address(text: str) -> str:
    text = text.rstrip("/")
    host, colon, port = text.rpartition(":")
    if not colon or (host.count(":") and not host.endswith("]")):  # a bare IPv6 address has colons of its own
        host, port = text, str(DEFAULT_PORT)
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65_536:
        raise InvalidRequest(f"{text!r} is not HOST:PORT")
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


@dataclass(frozen=True, slots=True)
class PartitionState:
    """The offsets a partition holds, `end` not included, and what it takes on disk."""

    first: int
    end: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TopicState:
    """A topic as it was when the broker answered."""

    name: str
    partitions: tuple[PartitionState, ...]
    retention_ms: int
    cleanup: str


@dataclass(frozen=True, slots=True)
class Appended:
    """How many records were written, and where: (partition, base offset, count)."""

    records: int
    placements: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class StageSize:
    """What lies under a handle."""

    records: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Publication:
    """`already`: this version, or a later one, had been published before, and nothing was changed."""

    app: str
    version: int
    already: bool
    records: int


@dataclass(frozen=True, slots=True)
class TopicSchema:
    """What a topic requires of its values."""

    name: str
    version: int
    kind: str
    """json, avro or protobuf."""
    definition: bytes
    others: tuple[bytes, ...] = ()
    """The definitions of other versions, in the order in which they are to be tried: the older ones from the newest on, then the newer."""


class BulkClient:
    """Connects when it is first used."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._lock = threading.Lock()
        self._flight: flight.FlightClient | None = None
        self._token: tuple[bytes, bytes] | None = None
        self._turn = 0
        self._is_closed = False

    def __enter__(self) -> BulkClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            connected, self._flight, self._is_closed = self._flight, None, True
        if connected is not None:
            connected.close()

    # Topics

    def topics(self) -> list[str]:
        """The names of those that this user may see."""
        return list(self._ask("topics", request.Topics()))

    def describe(self, topics: Sequence[str]) -> dict[str, TopicState]:
        """Raises `UnknownTopic`."""
        return _states(self._ask("describe", request.Describe(list(topics))))

    def create_topic(self, name: str, partitions: int = 1) -> None:
        """Raises `TopicExists`, `InvalidTopicName`."""
        self._ask("create_topic", request.CreateTopic(name, partitions), again=False)

    def ensure_topic(self, name: str) -> None:
        """Create it if it is missing and the broker allows that; else raises `UnknownTopic`."""
        self._ask("ensure_topic", request.EnsureTopic(name))

    def wait(self, ends: Mapping[str, Mapping[int, int]], wait_ms: int) -> dict[str, TopicState]:
        """The topics as soon as one of them ends behind what is given, or has a partition that is not; or when the time is over."""
        asked = request.Wait({topic: dict(places) for topic, places in ends.items()}, wait_ms)
        return _states(self._ask("wait", asked, seconds=self._servers.timeout_seconds + wait_ms / 1000))

    def offset_for_time(self, topic: str, times: Mapping[int, int]) -> dict[int, int | None]:
        """For each partition the first offset whose record is at or after the time (Unix ms); None: there is no such record."""
        found: Mapping[str, int | None] = self._ask("offset_for_time", request.OffsetForTime(topic, dict(times)))
        return {int(partition): offset for partition, offset in found.items()}

    # Reading

    def read(
        self,
        topic: str,
        partition: int,
        start: int,
        stop: int,
        *,
        columns: Sequence[str] = ALL,
        rows_max: int = 65_536,
        reached: Callable[[int], None] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The rows with start <= offset < stop that there are, in order, with exactly these columns.

        `reached` is told, before each batch, the offset to read on at behind it: for those who have more patience than this client.
        Raises `OffsetOutOfRange` below the first offset and above the end, `UnknownTopic`, `UnknownPartition`.
        """
        for name in columns:
            if name not in READ_SCHEMA.names:
                raise InvalidRequest(f"no column {name!r}; there are {', '.join(READ_SCHEMA.names)}")
        return self._read(topic, partition, start, stop, tuple(columns), rows_max, reached)

    def _read(
        self,
        topic: str,
        partition: int,
        start: int,
        stop: int,
        columns: tuple[str, ...],
        rows_max: int,
        reached: Callable[[int], None] | None,
    ) -> Iterator[pa.RecordBatch]:
        stored = [name for name in dict.fromkeys(columns) if name in STORED] or ["offset"]
        dress = _Dress(topic, partition, columns)
        position, failures = start, 0
        while True:
            try:
                for batch, read_on in self._stream(request.Range(topic, partition, position, stop, stored, rows_max)):
                    position, failures = read_on, 0
                    if reached is not None:
                        reached(position)
                    yield dress(batch)
                return
            except flight.FlightError as failure:
                if start < stop <= position:  # everything has come; what broke was only the end
                    return
                failures = self._failed(failure, failures)

    def _stream(self, wanted: request.Range) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Each batch with the offset to read on at."""
        reader = self._connected().do_get(flight.Ticket(encode(wanted)), self._options(None))
        try:
            while True:
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    return
                yield chunk.data, request.decode_place(chunk.app_metadata)
        finally:
            reader.cancel()

    def split(self, topic: str, partition: int, start: int, stop: int, parts: int) -> list[tuple[int, int]]:
        """The range as up to so many, cut where batches begin."""
        return [(begin, end) for begin, end in self._ask("split", request.Split(topic, partition, start, stop, parts))]

    # Writing

    def append(self, topic: str, batches: Iterable[pa.RecordBatch], *, partition: int | None = None) -> Appended:
        """Columns `value`, and where wanted `key`, `headers`, `partition`, `timestamp`. All of it is as safe as the topic promises when
        this returns. An error says how many records are (`durable_records`)."""
        answer = self._put(request.Append(topic, partition), batches)
        if answer is None:
            return Appended(0, [])
        return Appended(answer["records"], [(place[0], place[1], place[2]) for place in answer["placements"]])

    def _put(self, command: request.Put, batches: Iterable[pa.RecordBatch], otherwise: pa.RecordBatch | None = None) -> Any:
        """The answer; None if there is nothing to put."""
        coming = iter(batches)
        first = next(coming, otherwise)
        if first is None:
            return None
        descriptor = flight.FlightDescriptor.for_command(encode(command))
        try:
            self._make_sure()
            writer, answers = self._connected().do_put(descriptor, first.schema, self._options(None))
            with writer:
                writer.write_batch(first)
                for batch in coming:
                    writer.write_batch(batch)
                writer.done_writing()
                answer = answers.read()
        except flight.FlightError as failure:
            raise _raised(failure) from None
        if answer is None:
            raise Unavailable("the broker has closed the put without an answer")
        return request.decode(answer.to_pybytes(), dict, "answer")

    # Schemas and dead letters

    def schema(self, topic: str, version: int = 0) -> TopicSchema | None:
        """What the topic requires, or another version of it; None: nothing. Raises `UnknownTopic`, `UnknownSchema`."""
        found = self._ask("schema", request.Schema(topic, version))
        if found is None:
            return None
        definition, others = b64decode(found["definition"]), tuple(map(b64decode, found["others"]))
        return TopicSchema(found["name"], found["version"], found["kind"], definition, others)

    def stage(
        self,
        handle: str,
        batches: Iterable[pa.RecordBatch],
        *,
        topic: str | None,
        app: str,
        run_id: str = "",
        order: int = 0,
    ) -> StageSize:
        """As `append`, but nobody sees the records before the handle is published. `topic` None: a column `topic` says where to.

        The handle is sealed when this returns, also if there were no batches at all. If it raises, what came so far is dropped.
        """
        command = request.Stage(handle, app, topic, run_id, order)
        try:
            answer = self._put(command, batches, otherwise=_nothing(topic))
        except BrokerError:
            raise  # the broker has dropped it, unless it belongs to somebody else
        except BaseException:
            self._forsake(handle)
            raise
        return StageSize(answer["records"], answer["size_bytes"])

    def _forsake(self, handle: str) -> None:
        """The batches ended with an error of their own, which to the broker looks like their end."""
        try:
            self.drop([handle])
        except BrokerError:
            pass  # it goes when its time is over

    def publish(self, app: str, version: int, handles: Sequence[str], *, run_id: str = "", remember_ms: int = 0) -> Publication:
        """Everything staged under the handles becomes readable at once. A version that has been published before changes nothing, which
        is why this may be repeated; by an application that comes only once, within `remember_ms`. Raises `UnknownStage`, `StaleRun`."""
        asked = request.Publish(app, version, list(handles), run_id, remember_ms)
        answer = self._ask("publish", asked, seconds=_PUBLISH_SECONDS)
        return Publication(answer["app"], answer["version"], answer["already"], answer["records"])

    def drop(self, handles: Sequence[str]) -> int:
        """Forget what is staged; returns how many of the handles there were."""
        return int(self._ask("drop", request.Drop(list(handles))))

    def last_version(self, app: str) -> int | None:
        """What the application has published last; None: nothing yet."""
        found: int | None = self._ask("last_version", request.LastVersion(app))
        return found

    def dead_letters(self, topic: str, batch: pa.RecordBatch) -> int:
        """Move records to the dead letters of their topic: columns `partition`, `offset`, `error`, `reason`. A record that lies there for
        the same reason already is left alone; returns how many were moved."""
        answer = self._put(request.Letters(topic), [batch])
        return int(answer["moved"])

    # Groups

    def commit(self, group: str, offsets: Mapping[str, Mapping[int, int]]) -> None:
        """The next offsets to read: topic → partition → offset. Durable when this returns."""
        self._ask("commit", request.Commit(group, {topic: dict(places) for topic, places in offsets.items()}))

    def committed(self, group: str, topic: str) -> dict[int, int]:
        """What the group has committed, by partition."""
        found: Mapping[str, int] = self._ask("committed", request.Committed(group, topic))
        return {int(partition): offset for partition, offset in found.items()}

    # The line

    def _ask(self, verb: str, asked: request.Request, *, seconds: float | None = None, again: bool = True) -> Any:
        """The answer to an action, asked again after a failure of the line unless that could do harm."""
        action, failures = flight.Action(verb, encode(asked)), 0
        options = self._servers.timeout_seconds if seconds is None else seconds
        while True:
            try:
                (answer,) = self._connected().do_action(action, self._options(options))
                return request.decode(answer.body.to_pybytes(), object, "answer")
            except flight.FlightError as failure:
                failures = self._failed(failure, failures if again else _ATTEMPTS)

    def _make_sure(self) -> None:
        """Before a put, which cannot be repeated: a broker answers, and knows us. Costs a round trip, and finds another address or a new
        token where there is need."""
        failures = 0
        while True:
            try:
                self._connected().list_actions(self._options(self._servers.timeout_seconds))
                return
            except flight.FlightError as failure:
                failures = self._failed(failure, failures)

    def _failed(self, failure: flight.FlightError, failures: int) -> int:
        """Raise, or make ready for another attempt; returns how many there have been."""
        error = broker_error(failure)
        failures += 1
        if isinstance(failure, flight.FlightUnauthenticatedError) and self._token is not None and failures < _ATTEMPTS:
            self._drop_connection(next_address=False)  # the token has expired, or the broker is another one by now
            return failures
        if error is not None and not isinstance(error, Unavailable):
            raise error from None
        if failures >= _ATTEMPTS or not isinstance(failure, _LINE_FAILURES):
            raise _raised(failure) from None
        self._drop_connection()
        time.sleep(_BACKOFF_SECONDS * 3 ** (failures - 1))
        return failures

    def _connected(self) -> flight.FlightClient:
        with self._lock:
            if self._is_closed:
                raise Unavailable("the client is closed")
            if self._flight is None:
                connected = self._connect(self._servers.addresses[self._turn % len(self._servers.addresses)])
                if self._servers.user:
                    self._token = self._log_in(connected)
                self._flight = connected
            return self._flight

    def _connect(self, address: str) -> flight.FlightClient:
        servers, options = self._servers, dict[str, Any](generic_options=_OPTIONS)
        if not servers.tls:
            return flight.FlightClient(f"grpc+tcp://{address}", **options)
        if servers.ca_file:
            options["tls_root_certs"] = Path(servers.ca_file).read_bytes()
        if servers.certificate_file:
            options["cert_chain"], options["private_key"] = Path(servers.certificate_file).read_bytes(), Path(servers.key_file).read_bytes()
        if servers.server_name:
            options["override_hostname"] = servers.server_name
        return flight.FlightClient(f"grpc+tls://{address}", **options)

    def _log_in(self, connected: flight.FlightClient) -> tuple[bytes, bytes]:
        options = flight.FlightCallOptions(timeout=self._servers.timeout_seconds)
        try:
            token: tuple[bytes, bytes] = connected.authenticate_basic_token(self._servers.user, self._servers.password, options)
            # The password is verified with the first call, so that this one says whether it was right.
            list(connected.list_actions(flight.FlightCallOptions(timeout=self._servers.timeout_seconds, headers=[token])))
        except flight.FlightUnauthenticatedError as failure:
            raise _raised(failure) from None
        return token

    def _drop_connection(self, *, next_address: bool = True) -> None:
        """The next call connects anew, to the next address. Not closed here: other threads may be in the middle of a call."""
        with self._lock:
            self._flight = self._token = None
            self._turn += next_address

    def _options(self, seconds: float | None) -> flight.FlightCallOptions:
        if self._token is not None:
            return flight.FlightCallOptions(timeout=seconds, headers=[self._token])
        if self._servers.password and not self._servers.user:
            return flight.FlightCallOptions(timeout=seconds, headers=[(b"authorization", b"Bearer " + self._servers.password.encode())])
        return flight.FlightCallOptions(timeout=seconds)


class _Dress:
    """Adds the columns that are the same for all rows of a range."""

    def __init__(self, topic: str, partition: int, columns: tuple[str, ...]) -> None:
        self._constants = {
            "topic": pa.scalar(topic, pa.string()),
            "partition": pa.scalar(partition, pa.int32()),
            "timestampType": pa.scalar(TIMESTAMP_TYPE, pa.int32()),
        }
        self._columns = columns
        self._schema = pa.schema([READ_SCHEMA.field(name) for name in columns])
        self._made: dict[str, pa.Array] = {}

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if batch.schema.names == list(self._columns):
            return batch
        arrays = [self._constant(name, batch.num_rows) if name in self._constants else batch.column(name) for name in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _constant(self, name: str, rows: int) -> pa.Array:
        """A slice of one that was made before, if that is long enough."""
        made = self._made.get(name)
        if made is None or len(made) < rows:
            made = self._made[name] = pa.repeat(self._constants[name], rows)
        return made.slice(0, rows)


def _nothing(topic: str | None) -> pa.RecordBatch:
    """A put without any batch has no schema; this one is empty and fits nowhere else."""
    names = ["value"] if topic is not None else ["value", "topic"]
    return pa.RecordBatch.from_arrays([pa.array([], pa.binary() if name == "value" else pa.string()) for name in names], names=names)


def _raised(failure: flight.FlightError) -> BrokerError:
    error = broker_error(failure)
    if error is not None:
        return error
    if isinstance(failure, flight.FlightUnauthorizedError | flight.FlightInternalError | flight.FlightServerError):
        return BrokerError(_first_line(failure))
    if isinstance(failure, flight.FlightUnauthenticatedError):
        return LoginFailed()
    return Unavailable(_first_line(failure))


def _first_line(failure: flight.FlightError) -> str:
    """gRPC adds what it knows of its own inside; the first line is what happened."""
    return str(failure).partition("gRPC client debug context")[0].strip().partition("\n")[0] or type(failure).__name__


def _states(found: Mapping[str, Any]) -> dict[str, TopicState]:
    return {
        name: TopicState(name, tuple(PartitionState(*places) for places in state["partitions"]), state["retention_ms"], state["cleanup"])
        for name, state in found.items()
    }
