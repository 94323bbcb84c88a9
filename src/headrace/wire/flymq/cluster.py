"""Layouts of the cluster requests (0x50–0x53) and of their replies.

    CLUSTER_JOIN       peer s16                              → done
    CLUSTER_LEAVE      –                                     → done
    CLUSTER_STATUS     –                                     → cluster s16, leader s16, term u64, commit index u64, nodes u32, topics u32,
                                                               messages u64, then for each node: id s16, address s16, cluster address s16,
                                                               state s16, role s16, leader bool, uptime s16
    CLUSTER_METADATA   [topic s16] (missing: all)            → cluster s16, list of (topic s16, list of (partition i32, leader s16, address
                                                               s16, epoch u64, state s16, replicas list of s16, in-sync list of s16))

Only clients of the original send CLUSTER_METADATA, to find the partitions of a topic. CLUSTER_STATUS has no layout there; its fields follow
the types in the original's clients.
"""

from __future__ import annotations

from headrace.wire.flymq.advanced_messages import ClusterJoin, ClusterLeave, ClusterNode, ClusterReport, ClusterStatus
from headrace.wire.flymq.fields import BOOL, I32, S16, U32, U64, Layout, Reader, Repeated, Trailing
from headrace.wire.flymq.messages import ClusterMetadata, ClusterTopics, PartitionLeadership, TopicLeadership

CLUSTER_JOIN = Layout(ClusterJoin, peer=S16)
CLUSTER_LEAVE = Layout(ClusterLeave)
CLUSTER_STATUS = Layout(ClusterStatus)
CLUSTER_METADATA = Layout(ClusterMetadata, topic=Trailing(S16, "", always=True))

_NODE = Layout(ClusterNode, id=S16, address=S16, cluster_address=S16, state=S16, role=S16, is_leader=BOOL, uptime=S16)


class ReportLayout:
    """List of nodes whose count comes before other fields."""

    def read(self, reader: Reader, /) -> ClusterReport:
        cluster, leader, term, index = S16.read(reader), S16.read(reader), U64.read(reader), U64.read(reader)
        nodes, topics, messages = U32.read(reader), U32.read(reader), U64.read(reader)
        return ClusterReport(cluster, leader, term, index, nodes, topics, messages, [_NODE.read(reader) for _ in range(nodes)])

    def write(self, value: ClusterReport, /) -> bytes:
        head = S16.write(value.cluster) + S16.write(value.leader) + U64.write(value.term) + U64.write(value.commit_index)
        counts = U32.write(value.node_count) + U32.write(value.topic_count) + U64.write(value.message_count)
        return head + counts + b"".join(map(_NODE.write, value.nodes))


CLUSTER_REPORT = ReportLayout()

_PARTITION = Layout(
    PartitionLeadership,
    partition=I32,
    leader=S16,
    address=S16,
    epoch=U64,
    state=S16,
    replicas=Repeated(S16),
    in_sync=Repeated(S16),
)
CLUSTER_TOPICS = Layout(
    ClusterTopics,
    cluster=S16,
    topics=Repeated(Layout(TopicLeadership, topic=S16, partitions=Repeated(_PARTITION))),
)
