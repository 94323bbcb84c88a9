"""Cluster requests of FlyMQ. The cluster is this single node, which leads every partition; no node can join or leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from headrace.broker import Broker, Principal, Topic
from headrace.broker.overview import Report
from headrace.errors import InvalidRequest
from headrace.wire.flymq.advanced_messages import ClusterJoin, ClusterLeave, ClusterNode, ClusterReport, ClusterStatus
from headrace.wire.flymq.messages import ClusterMetadata, ClusterTopics, PartitionLeadership, Reply, TopicLeadership

_TERM: Final = 1
"""Term of a cluster without elections."""


@dataclass(frozen=True, slots=True)
class Node:
    """Node that this broker reports to its clients."""

    name: str = "headrace"
    address: str = "127.0.0.1:9092"
    cluster: str = "standalone"
    report: Report = dict
    """Returns the facts of the server process, for the operation `status` of BROKER."""


class ClusterHandlers:
    """Handlers of the cluster requests. `who` returns the current principal."""

    def __init__(self, broker: Broker, who: Callable[[], Principal], node: Node) -> None:
        self._broker = broker
        self._who = who
        self._node = node

    async def join(self, request: ClusterJoin) -> Reply:
        raise InvalidRequest("clustering is not enabled: this broker keeps its log itself and is a cluster of one")

    async def leave(self, request: ClusterLeave) -> Reply:
        raise InvalidRequest("cannot leave: this broker is the only node of its cluster; stop it instead")

    async def status(self, request: ClusterStatus) -> Reply:
        node, status = self._node, await self._broker.status(self._who())
        itself = ClusterNode(node.name, node.address, "", "online", "leader", True, duration(status.uptime_ms))
        return ClusterReport(node.cluster, node.name, _TERM, status.written, 1, status.topics, status.records, [itself])

    async def metadata(self, request: ClusterMetadata) -> Reply:
        node, who = self._node, self._who()

        def leadership(partition: int) -> PartitionLeadership:
            return PartitionLeadership(partition, node.name, node.address, replicas=[node.name], in_sync=[node.name])

        def led(topics: list[Topic]) -> list[TopicLeadership]:
            return [TopicLeadership(topic.name, [leadership(index) for index in range(topic.partitions)]) for topic in topics]

        slices = [led([self._broker.topic(who, request.topic)])] if request.topic else await self._broker.listed(who, led)
        return ClusterTopics(node.cluster, [topic for topics in slices for topic in topics])


def duration(ms: int) -> str:
    """Format a duration as in 1h2m3s."""
    minutes, seconds = divmod(ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{seconds}s"
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
