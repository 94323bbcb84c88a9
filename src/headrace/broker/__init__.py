"""The protocol-neutral broker: topics, delivery, groups, settlement, transactions, access.

Sessions use only the names exported here. The types of topics and batches come from the engine contract.
"""

from __future__ import annotations

from headrace.broker.authorizer import Action, Principal, Resource, allow_all
from headrace.broker.broker import Broker
from headrace.broker.dead_letters.dead_letters import DeadLetterEntry
from headrace.broker.groups.members import Delivery, Member, MemberEntry, SettlementPolicy
from headrace.broker.groups.membership import Mode
from headrace.broker.groups.offsets import GroupLag
from headrace.broker.publishing.publish import ProducerStamp
from headrace.broker.publishing.published import Landing, Outcome, Published, PublishedEach, PublishedOne, PublishedTogether
from headrace.broker.publishing.requirements import NOWHERE, OnInvalid
from headrace.broker.reading.cursor import Cursor
from headrace.broker.reading.fetch import Fetched
from headrace.broker.schema_checks import settled
from headrace.broker.schemas.registry import Requirement, SchemaVersion
from headrace.broker.settings import BrokerSettings
from headrace.broker.transactions import Transaction
from headrace.broker.writers.progress import WriterEntry
from headrace.broker.writers.stages import Publication, StageSize
from headrace.engine.contract import Ack, Batch, Bounds, Cleanup, Topic, TopicConfig
from headrace.schemas import Compatibility, SchemaType, type_named

__all__ = [
    "NOWHERE",
    "Ack",
    "Action",
    "Batch",
    "Bounds",
    "Broker",
    "BrokerSettings",
    "Cleanup",
    "Compatibility",
    "Cursor",
    "DeadLetterEntry",
    "Delivery",
    "Fetched",
    "GroupLag",
    "Landing",
    "Member",
    "MemberEntry",
    "Mode",
    "OnInvalid",
    "Outcome",
    "Principal",
    "ProducerStamp",
    "Publication",
    "Published",
    "PublishedEach",
    "PublishedOne",
    "PublishedTogether",
    "Requirement",
    "Resource",
    "SchemaType",
    "SchemaVersion",
    "SettlementPolicy",
    "StageSize",
    "Topic",
    "TopicConfig",
    "Transaction",
    "WriterEntry",
    "allow_all",
    "settled",
    "type_named",
]
