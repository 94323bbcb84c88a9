"""The protocol-neutral broker: topics, delivery, groups, settlement, transactions, access.

Sessions need nothing but what this package exports; the types of topics and batches are those of the engine contract.
"""

from __future__ import annotations

from headrace.broker.access import Action, Authorize, Principal, Resource, allow_all
from headrace.broker.broker import Broker
from headrace.broker.cursor import Cursor
from headrace.broker.fetch import Fetched
from headrace.broker.groups import GroupLag
from headrace.broker.publish import ProducerStamp, Published
from headrace.broker.settings import BrokerSettings
from headrace.broker.settlement import Delivery, SettlementPolicy, SettlementQueue
from headrace.broker.transactions import Transaction
from headrace.engine.contract import Ack, Batch, Bounds, Cleanup, Topic, TopicConfig

__all__ = [
    "Ack",
    "Action",
    "Authorize",
    "Batch",
    "Bounds",
    "Broker",
    "BrokerSettings",
    "Cleanup",
    "Cursor",
    "Delivery",
    "Fetched",
    "GroupLag",
    "Principal",
    "ProducerStamp",
    "Published",
    "Resource",
    "SettlementPolicy",
    "SettlementQueue",
    "Topic",
    "TopicConfig",
    "Transaction",
    "allow_all",
]
