"""The protocol-neutral broker: topics, delivery, groups, settlement, transactions, access.

Sessions need nothing but what this package exports; the types of topics and batches are those of the engine contract.
"""

from __future__ import annotations

from headrace.broker.access import Action, Authorize, Principal, Resource, allow_all
from headrace.broker.broker import Broker
from headrace.broker.cursor import Cursor
from headrace.broker.dead_letters import DeadLetterEntry, Replayed
from headrace.broker.delayed import DelayedEntry
from headrace.broker.fetch import Fetched
from headrace.broker.groups import GroupLag
from headrace.broker.publish import ProducerStamp, Published
from headrace.broker.rules import NOWHERE, OnInvalid
from headrace.broker.schema_checks import SchemaCheckPending, settled
from headrace.broker.schema_registry import Requirement, SchemaVersion
from headrace.broker.settings import BrokerSettings
from headrace.broker.settlement import Delivery, SettlementPolicy, SettlementQueue
from headrace.broker.sinks import AppEntry
from headrace.broker.stages import Publication, StageEntry, StageSize
from headrace.broker.status import Status
from headrace.broker.transactions import Transaction
from headrace.engine.contract import Ack, Batch, Bounds, Cleanup, Topic, TopicConfig
from headrace.schemas import Compatibility, SchemaType, type_named

__all__ = [
    "NOWHERE",
    "Ack",
    "Action",
    "AppEntry",
    "Authorize",
    "Batch",
    "Bounds",
    "Broker",
    "BrokerSettings",
    "Cleanup",
    "Compatibility",
    "Cursor",
    "DeadLetterEntry",
    "DelayedEntry",
    "Delivery",
    "Fetched",
    "GroupLag",
    "OnInvalid",
    "Principal",
    "ProducerStamp",
    "Publication",
    "Published",
    "Replayed",
    "Requirement",
    "Resource",
    "SchemaCheckPending",
    "SchemaType",
    "SchemaVersion",
    "SettlementPolicy",
    "SettlementQueue",
    "StageEntry",
    "StageSize",
    "Status",
    "Topic",
    "TopicConfig",
    "Transaction",
    "allow_all",
    "settled",
    "type_named",
]
