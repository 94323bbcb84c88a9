"""Connection to Kafka: metadata, offsets, settings of topics and Fetch requests, in Kafka's names.

aiokafka's clients reconnect by themselves. A request that fails with a retriable error is repeated until a deadline, then it raises
`Unavailable`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.client import AIOKafkaClient, ConnectionGroup
from aiokafka.conn import create_conn
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.types import Array, Int16, Int32, Schema, String
from aiokafka.structs import TopicPartition

from headrace.engine.kafka.receiving import ViewFetchRequest, receive_frames
from headrace.engine.kafka.settings import KafkaSettings
from headrace.errors import BrokerError, InvalidRequest, NotAuthorized, RecordTooLarge, TopicExists, Unavailable

T = TypeVar("T")
_READ_COMMITTED: Final = 1
_LATEST, _EARLIEST = -1, -2
_RETRY_SECONDS: Final = 0.05
_GROUP_ID_NOT_FOUND: Final = 69
_CLIENT_ID: Final = "headrace"
# The library logs each failed attempt. The engine reports to its health instead.
logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


@dataclass(slots=True)
class FetchedPartition:
    """Answer of a Fetch request for one partition."""

    topic: str
    partition: int
    error: type[Any]
    stable_end: int
    """Offsets below it are committed."""
    first: int
    aborted: Sequence[tuple[int, int]] | None
    content: bytes | memoryview
    """Record batches, in the memory of the whole response."""


class _OffsetDeleteResponse(Response):  # type: ignore[misc]  # the library has no types
    API_KEY, API_VERSION = 47, 0
    SCHEMA = Schema(
        ("error_code", Int16),
        ("throttle_time_ms", Int32),
        ("topics", Array(("topic", String("utf-8")), ("partitions", Array(("partition", Int32), ("error_code", Int16))))),
    )


class _OffsetDelete(RequestStruct):  # type: ignore[misc]
    API_KEY, API_VERSION = 47, 0
    RESPONSE_TYPE = _OffsetDeleteResponse
    SCHEMA = Schema(
        ("group", String("utf-8")),
        ("topics", Array(("topic", String("utf-8")), ("partitions", Array(Int32)))),
    )


class OffsetDeleteRequest(Request[_OffsetDelete]):  # type: ignore[misc]
    """Delete committed offsets of a group. The library lacks it."""

    API_KEY = 47

    def __init__(self, group: str, topics: list[tuple[str, list[int]]]) -> None:
        self._group, self._topics = group, topics

    def build(self, kind: type[Any]) -> Any:
        return kind(self._group, self._topics)


@dataclass(slots=True)
class KafkaCounters:
    """Requests for records and offsets by kind, and failed requests by the name of the error, for metrics."""

    requests: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)


class Cluster:
    """A Kafka cluster. Names are Kafka's."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self.counters = KafkaCounters()
        self._deadline_seconds = settings.deadline_ms / 1000
        self._admin: Any = None
        self._reader: Any = None
        self._follower: Any = None
        self._replicas: dict[str, int] = {}

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of every aiokafka client."""
        return {
            "bootstrap_servers": self._settings.bootstrap,
            "client_id": _CLIENT_ID,
            "request_timeout_ms": max(1_000, self._settings.deadline_ms),
            **self._settings.security,
        }

    async def open(self) -> None:
        """Connect. Raises `Unavailable` if no bootstrap server answers."""
        self._admin = AIOKafkaAdminClient(**self.arguments)
        self._reader = AIOKafkaClient(metadata_max_age_ms=30_000, **self.arguments)
        self._follower = AIOKafkaClient(metadata_max_age_ms=30_000, **self.arguments)
        try:
            await self._admin.start()
            await self._reader.bootstrap()
            await self._follower.bootstrap()
        except (kafka_errors.KafkaError, OSError) as failure:
            await self.close()
            raise Unavailable(await self._connection_failure(failure)) from None

    async def _connection_failure(self, failure: Exception) -> str:
        """Return why no connection succeeds. The library logs the reason and raises an error without it, so this connects once more."""
        arguments = {name: value for name, value in self.arguments.items() if name != "bootstrap_servers"}
        for address in self._settings.bootstrap.split(","):
            host, _, port = address.rpartition(":")
            try:
                (await create_conn(host, int(port), **arguments)).close()
            except (kafka_errors.SaslAuthenticationFailed, kafka_errors.UnsupportedSaslMechanismError) as refused:
                return f"Kafka at {address} refuses the login; check kafka.sasl, kafka.user and kafka.password: {_text(refused)}"
            except (kafka_errors.KafkaError, OSError) as other:
                failure = other
                if untrusted := getattr(other, "verify_message", ""):  # `ssl.SSLCertVerificationError`
                    return f"Kafka at {address} has a certificate that is not trusted; check kafka.tls_ca: {untrusted}"
                if "CERTIFICATE" in (getattr(other.__cause__, "reason", "") or ""):  # `ssl.SSLError`
                    advice = "check kafka.tls_certificate and kafka.tls_key"
                    return f"Kafka at {address} refuses the client certificate, or the lack of one; {advice}: {other.__cause__}"
        return f"Kafka at {self._settings.bootstrap} does not answer: {_text(failure)}"

    async def close(self) -> None:
        for client in (self._admin, self._reader, self._follower):
            if client is not None:
                with contextlib.suppress(kafka_errors.KafkaError, OSError):
                    await client.close()
        self._admin = self._reader = self._follower = None

    # Topics

    async def partition_counts(self) -> dict[str, int]:
        """Return the number of partitions of every topic."""
        metadata = await self._admin._client.fetch_all_metadata()
        self._replicas = {topic: len(partitions[0].replicas) for topic, partitions in metadata._partitions.items() if 0 in partitions}
        return {topic: len(metadata.partitions_for_topic(topic) or ()) for topic in metadata.topics()}

    def replicas(self, topic: str) -> int:
        """Return the replicas of a topic, as of the last `partition_counts`."""
        return self._replicas.get(topic, 1)

    async def configs(self, topics: Sequence[str], names: Iterable[str], *, must_exist: bool = False) -> dict[str, dict[str, str]]:
        """Return some settings of topics. With `must_exist`, waits for a topic that the asked node has not heard of yet."""
        if not topics:
            return {}
        wanted = dict.fromkeys(names)
        resources = [ConfigResource(ConfigResourceType.TOPIC, topic, configs=wanted) for topic in topics]

        async def ask() -> dict[str, dict[str, str]]:
            (answer,) = await self._admin.describe_configs(resources)
            found: dict[str, dict[str, str]] = {}
            for error_code, _message, _kind, topic, entries in answer.resources:
                if error_code == kafka_errors.UnknownTopicOrPartitionError.errno and not must_exist:
                    continue  # deleted a moment ago
                _check(kafka_errors.for_code(error_code))
                found[topic] = {entry[0]: entry[1] for entry in entries}
            return found

        return await self.retried(ask)

    async def create_topic(self, topic: str, partitions: int, config: Mapping[str, str]) -> None:
        new = NewTopic(topic, partitions, await self._replication(), topic_configs=dict(config))

        async def ask() -> None:
            await self._know_controller()
            answer = await self._admin.create_topics([new])
            for name, error_code, *message in answer.topic_errors:
                _check(kafka_errors.for_code(error_code), name, *message)

        await self.retried(ask)
        await self._until_led(topic, partitions)

    async def _replication(self) -> int:
        """Return the replicas of a new topic. The library cannot ask for the default of the cluster."""
        if self._settings.replication > 0:
            return self._settings.replication

        async def ask() -> int:
            node = self._admin._client.get_random_node()
            resource = ConfigResource(ConfigResourceType.BROKER, str(node), configs={"default.replication.factor": None})
            (answer,) = await self._admin.describe_configs([resource])
            ((error_code, _message, _kind, _name, entries),) = answer.resources
            _check(kafka_errors.for_code(error_code))
            return int(entries[0][1])

        return await self.retried(ask)

    async def add_partitions(self, topic: str, partitions: int) -> None:
        async def ask() -> None:
            await self._know_controller()
            answer = await self._admin.create_partitions({topic: NewPartitions(partitions)})
            for name, error_code, *message in answer.topic_errors:
                _check(kafka_errors.for_code(error_code), name, *message)

        await self.retried(ask)
        await self._until_led(topic, partitions)

    async def alter_config(self, topic: str, config: Mapping[str, str]) -> None:
        async def ask() -> None:
            for answer in await self._admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=dict(config))]):
                for error_code, *_ in answer.resources:
                    _check(kafka_errors.for_code(error_code), topic)

        await self.retried(ask)

    async def delete_topic(self, topic: str) -> None:
        async def ask() -> None:
            await self._know_controller()
            answer = await self._admin.delete_topics([topic])
            for name, error_code in answer.topic_error_codes:
                if error_code != kafka_errors.UnknownTopicOrPartitionError.errno:
                    _check(kafka_errors.for_code(error_code), name)

        await self.retried(ask)

        async def is_gone() -> None:
            if topic in await self.partition_counts():
                raise kafka_errors.StaleMetadata

        await self.retried(is_gone)
        for client in (self._admin._client, self._reader, self._follower):
            client.force_metadata_update()

    async def _know_controller(self) -> None:
        client = self._admin._client
        if client.cluster.controller is None:
            await client.force_metadata_update()
            if client.cluster.controller is None:
                raise kafka_errors.LeaderNotAvailableError("the controller is not known")

    async def _until_led(self, topic: str, partitions: int) -> None:
        """Wait until every partition has a leader, so that the first write need not."""

        async def is_led() -> None:
            for client in (self._reader, self._follower):
                client.add_topic(topic)
                await client.force_metadata_update()
                leaders = [client.cluster.leader_for_partition(TopicPartition(topic, number)) for number in range(partitions)]
                if any(leader is None or leader < 0 for leader in leaders):
                    raise kafka_errors.LeaderNotAvailableError

        await self.retried(is_led)

    # Offsets

    async def bounds(self, partitions: Sequence[tuple[str, int]], *, is_patient: bool = True) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the first and the stable end offset of partitions. Unless `is_patient`, one that has no leader now is left out."""
        first = await self._offsets(dict.fromkeys(partitions, _EARLIEST), is_patient)
        latest = await self._offsets(dict.fromkeys(first, _LATEST), is_patient)
        return {place: (first[place], end) for place, end in latest.items()}

    async def offset_for_time(self, topic: str, partition: int, timestamp: int) -> int | None:
        """Return the first offset at or after a time; None if there is none."""
        found = (await self._offsets({(topic, partition): timestamp})).get((topic, partition), -1)
        return None if found < 0 else found

    async def _offsets(self, wanted: Mapping[tuple[str, int], int], is_patient: bool = True) -> dict[tuple[str, int], int]:
        async def ask() -> dict[tuple[str, int], int]:
            by_node: dict[int, dict[str, list[tuple[int, int]]]] = {}
            for (topic, partition), time in wanted.items():
                try:
                    node = self.leader(self._reader, topic, partition)
                except kafka_errors.LeaderNotAvailableError:
                    if is_patient:
                        raise
                    continue
                by_node.setdefault(node, {}).setdefault(topic, []).append((partition, time))
            found: dict[tuple[str, int], int] = {}
            for node, topics in by_node.items():
                self.counters.requests["list_offsets"] += 1
                answer = await self._reader.send(node, OffsetRequest(-1, _READ_COMMITTED, list(topics.items())))
                for topic, answers in answer.topics:
                    for partition, error_code, _timestamp, offset in answers:
                        error = kafka_errors.for_code(error_code)
                        if error is kafka_errors.UnknownTopicOrPartitionError or (error.retriable and not is_patient):
                            continue  # deleted a moment ago, or about to move
                        _check(error, topic)
                        found[topic, partition] = offset
            return found

        return await self.retried(ask)

    def leader(self, client: Any, topic: str, partition: int) -> int:
        node = client.cluster.leader_for_partition(TopicPartition(topic, partition))
        if node is None or node < 0:
            client.add_topic(topic)
            client.force_metadata_update()
            raise kafka_errors.LeaderNotAvailableError(topic)
        return int(node)

    # Groups

    async def groups(self) -> list[str]:
        """Return the names of all groups."""

        async def ask() -> list[str]:
            return sorted(group[0] for group in await self._admin.list_consumer_groups())

        return await self.retried(ask)

    async def group_offsets(self, group: str) -> dict[tuple[str, int], tuple[int, str]]:
        """Return the committed offsets of a group with their metadata."""

        async def ask() -> dict[tuple[str, int], tuple[int, str]]:
            found = await self._admin.list_consumer_group_offsets(group)
            return {(place.topic, place.partition): (committed.offset, committed.metadata or "") for place, committed in found.items()}

        return await self.retried(ask)

    async def delete_offsets(self, group: str, places: Sequence[tuple[str, int]]) -> None:
        """Delete committed offsets of a group without members."""
        topics: dict[str, list[int]] = {}
        for topic, partition in places:
            topics.setdefault(topic, []).append(partition)

        async def ask() -> None:
            node = await self._admin.find_coordinator(group)
            answer = await self._admin._client.send(node, OffsetDeleteRequest(group, list(topics.items())))
            if answer.error_code != _GROUP_ID_NOT_FOUND:
                _check(kafka_errors.for_code(answer.error_code), group)

        await self.retried(ask)

    # Fetch

    async def fetch(self, topic: str, partition: int, offset: int, *, bytes_max: int, wait_ms: int) -> FetchedPartition:
        """Read one partition. The answer has no retriable error."""

        async def ask() -> FetchedPartition:
            node = self.leader(self._reader, topic, partition)
            (answer,) = await self._fetch(self._reader, node, {(topic, partition): offset}, bytes_max, wait_ms)
            if answer.error.retriable:
                raise answer.error(topic)
            return answer

        return await self.retried(ask)

    async def follow(self, node: int, places: Mapping[tuple[str, int], int], *, bytes_max: int, wait_ms: int) -> list[FetchedPartition]:
        """Wait for records in any of the partitions, whose leader is `node`."""
        return await self._fetch(self._follower, node, places, bytes_max, wait_ms)

    def by_leader(self, places: Iterable[tuple[str, int]]) -> dict[int, list[tuple[str, int]]]:
        """Return the partitions by the node that leads them; those without a leader are left out."""
        found: dict[int, list[tuple[str, int]]] = {}
        for place in places:
            with contextlib.suppress(kafka_errors.KafkaError):
                found.setdefault(self.leader(self._follower, *place), []).append(place)
        return found

    async def _fetch(
        self, client: Any, node: int, places: Mapping[tuple[str, int], int], bytes_max: int, wait_ms: int
    ) -> list[FetchedPartition]:
        topics: dict[str, list[tuple[int, int, int]]] = {}
        for (topic, partition), offset in places.items():
            topics.setdefault(topic, []).append((partition, offset, bytes_max))
        request = ViewFetchRequest(wait_ms, 1, max(bytes_max, 1 << 20), _READ_COMMITTED, list(topics.items()))
        self.counters.requests["fetch"] += 1
        if await client.ready(node):
            receive_frames(client._conns[node, ConnectionGroup.DEFAULT])
        answer = await client.send(node, request)
        found: list[FetchedPartition] = []
        for topic, partitions in answer.topics:
            for partition, error_code, _high, stable_end, first, aborted, *_rack, content in partitions:
                error = kafka_errors.for_code(error_code)
                if getattr(error, "invalid_metadata", False):
                    client.force_metadata_update()
                found.append(FetchedPartition(topic, partition, error, stable_end, first, aborted, content or b""))
        return found

    # Errors

    async def retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Repeat a request that fails with a retriable error until the deadline. Raises `Unavailable` then."""
        # In a task of its own: timeouts need one, and sessions run their requests without.
        return await asyncio.get_running_loop().create_task(self._retried(ask))

    async def _retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        last: Exception | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deadline_seconds):
                while True:
                    try:
                        return await ask()
                    except (kafka_errors.KafkaError, OSError) as failure:
                        self.counters.errors[type(failure).__name__] += 1
                        if not (isinstance(failure, OSError) or _is_transient(failure)):
                            raise broker_error(failure) from failure
                        last = failure
                    await asyncio.sleep(_RETRY_SECONDS)
        raise Unavailable(f"Kafka did not answer within {self._deadline_seconds:g} s" + (f": {_text(last)}" if last else ""))


def _is_transient(failure: Exception) -> bool:
    return bool(getattr(failure, "retriable", False)) or isinstance(
        failure, (kafka_errors.KafkaConnectionError, kafka_errors.NodeNotReadyError, kafka_errors.KafkaTimeoutError)
    )


def _text(failure: BaseException | None) -> str:
    return str(failure) or type(failure).__name__


def _check(error: type[Any], *about: object) -> None:
    if error is not kafka_errors.NoError:
        raise error(*(item for item in about if item))


def broker_error(failure: Exception) -> BrokerError:
    """Return our error for a Kafka error after which nothing was written."""
    match failure:
        case kafka_errors.TopicAlreadyExistsError():
            return TopicExists(str(failure.args[0]) if failure.args else "")
        case kafka_errors.MessageSizeTooLargeError():
            return RecordTooLarge(size_bytes=0, bytes_max=0)
        case kafka_errors.TopicAuthorizationFailedError() | kafka_errors.GroupAuthorizationFailedError():
            return NotAuthorized(
                principal="Headrace", action="use", resource=f"{failure.args[0] if failure.args else 'the topic'} in Kafka"
            )
        case _ if _is_transient(failure):
            return Unavailable(f"Kafka: {_text(failure)}")
        case _:
            return InvalidRequest(f"Kafka refused the request: {_text(failure)}")
