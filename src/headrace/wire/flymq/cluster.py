"""Layout of CLUSTER_METADATA (0x53) and of its reply.

    request    [topic s16]                                   missing or empty: all topics
    reply      cluster s16, list of (topic s16, list of (partition i32, leader s16, address s16, epoch u64, state s16,
               replicas list of s16, in-sync list of s16))

Only clients of the original send it, to find the partitions of a topic.
"""

from __future__ import annotations

from headrace.wire.flymq.fields import I32, S16, U64, Layout, Repeated, Trailing
from headrace.wire.flymq.messages import ClusterMetadata, ClusterTopics, PartitionLeadership, TopicLeadership

CLUSTER_METADATA = Layout(ClusterMetadata, topic=Trailing(S16, "", always=True))

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
