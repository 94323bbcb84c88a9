"""Headrace: a durable message log with several wire protocols.

    import headrace

    async with headrace.connect("flymq://127.0.0.1") as client:
        receipt = await client.publish("demo", b"hello")

Every error is a `HeadraceError`. The names below are imported on first use: `import headrace` alone stays cheap, above all for the
command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from headrace import sync as sync
    from headrace.clients.api import Client as Client
    from headrace.clients.api import Subscription as Subscription
    from headrace.clients.blipmq.client import BlipMqClient as BlipMqClient
    from headrace.clients.blipmq.client import BlipMqOptions as BlipMqOptions
    from headrace.clients.connect import connect as connect
    from headrace.clients.errors import AlreadySubscribed as AlreadySubscribed
    from headrace.clients.errors import ClientClosed as ClientClosed
    from headrace.clients.errors import ClientError as ClientError
    from headrace.clients.errors import ConnectFailed as ConnectFailed
    from headrace.clients.errors import InvalidArgument as InvalidArgument
    from headrace.clients.errors import InvalidUrl as InvalidUrl
    from headrace.clients.errors import LoginRefused as LoginRefused
    from headrace.clients.errors import NothingToSettle as NothingToSettle
    from headrace.clients.errors import NotSent as NotSent
    from headrace.clients.errors import NotSupported as NotSupported
    from headrace.clients.errors import OutcomeUnknown as OutcomeUnknown
    from headrace.clients.errors import RecordRefused as RecordRefused
    from headrace.clients.errors import Refused as Refused
    from headrace.clients.errors import RefusedRepeatedly as RefusedRepeatedly
    from headrace.clients.errors import UnknownGroup as UnknownGroup
    from headrace.clients.figg.client import FiggClient as FiggClient
    from headrace.clients.figg.client import FiggOptions as FiggOptions
    from headrace.clients.flymq.advanced import DeadLetter as DeadLetter
    from headrace.clients.flymq.client import FlyMqClient as FlyMqClient
    from headrace.clients.flymq.client import FlyMqOptions as FlyMqOptions
    from headrace.clients.flymq.schemas import RegisteredSchema as RegisteredSchema
    from headrace.clients.fujin.client import FujinClient as FujinClient
    from headrace.clients.fujin.client import FujinOptions as FujinOptions
    from headrace.clients.messages import ConnectionState as ConnectionState
    from headrace.clients.messages import DelayedReceipt as DelayedReceipt
    from headrace.clients.messages import Gap as Gap
    from headrace.clients.messages import Message as Message
    from headrace.clients.messages import MessageBatch as MessageBatch
    from headrace.clients.messages import Receipt as Receipt
    from headrace.clients.messages import Transaction as Transaction
    from headrace.clients.options import ClientOptions as ClientOptions
    from headrace.clients.rustlog.client import RustLogClient as RustLogClient
    from headrace.clients.rustlog.client import RustLogOptions as RustLogOptions
    from headrace.clients.tls import TlsOptions as TlsOptions
    from headrace.errors import AppendUnknown as AppendUnknown
    from headrace.errors import BrokerError as BrokerError
    from headrace.errors import ConfigError as ConfigError
    from headrace.errors import CorruptData as CorruptData
    from headrace.errors import DiskFull as DiskFull
    from headrace.errors import EntryExists as EntryExists
    from headrace.errors import GroupHasMembers as GroupHasMembers
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.errors import IncompatibleSchema as IncompatibleSchema
    from headrace.errors import InvalidRecord as InvalidRecord
    from headrace.errors import InvalidRequest as InvalidRequest
    from headrace.errors import InvalidSchema as InvalidSchema
    from headrace.errors import InvalidTopicName as InvalidTopicName
    from headrace.errors import InvalidTransaction as InvalidTransaction
    from headrace.errors import LimitExceeded as LimitExceeded
    from headrace.errors import LoginFailed as LoginFailed
    from headrace.errors import LoginThrottled as LoginThrottled
    from headrace.errors import NoSuchEntry as NoSuchEntry
    from headrace.errors import NotAuthorized as NotAuthorized
    from headrace.errors import NotCoordinator as NotCoordinator
    from headrace.errors import OffsetOutOfRange as OffsetOutOfRange
    from headrace.errors import OutOfSequence as OutOfSequence
    from headrace.errors import RecordTooLarge as RecordTooLarge
    from headrace.errors import StaleEpoch as StaleEpoch
    from headrace.errors import StorageFailed as StorageFailed
    from headrace.errors import TopicExists as TopicExists
    from headrace.errors import Unavailable as Unavailable
    from headrace.errors import UnknownDelivery as UnknownDelivery
    from headrace.errors import UnknownMessage as UnknownMessage
    from headrace.errors import UnknownPartition as UnknownPartition
    from headrace.errors import UnknownSchema as UnknownSchema
    from headrace.errors import UnknownStage as UnknownStage
    from headrace.errors import UnknownTopic as UnknownTopic
    from headrace.errors import WireError as WireError
    from headrace.extras import MissingExtra as MissingExtra
    from headrace.retry import Backoff as Backoff
    from headrace.retry import exponential as exponential
    from headrace.sync import SyncClient as SyncClient
    from headrace.sync import SyncMessage as SyncMessage
    from headrace.sync import SyncSubscription as SyncSubscription
    from headrace.sync import SyncTransaction as SyncTransaction

_MODULES: Final = {
    "headrace.clients.api": "Client Subscription",
    "headrace.clients.blipmq.client": "BlipMqClient BlipMqOptions",
    "headrace.clients.connect": "connect",
    "headrace.clients.errors": """
        AlreadySubscribed ClientClosed ClientError ConnectFailed InvalidArgument InvalidUrl LoginRefused NotSent
        NotSupported NothingToSettle OutcomeUnknown RecordRefused Refused RefusedRepeatedly UnknownGroup
    """,
    "headrace.clients.figg.client": "FiggClient FiggOptions",
    "headrace.clients.flymq.advanced": "DeadLetter",
    "headrace.clients.flymq.client": "FlyMqClient FlyMqOptions",
    "headrace.clients.flymq.schemas": "RegisteredSchema",
    "headrace.clients.fujin.client": "FujinClient FujinOptions",
    "headrace.clients.messages": "ConnectionState DelayedReceipt Gap Message MessageBatch Receipt Transaction",
    "headrace.clients.options": "ClientOptions",
    "headrace.clients.rustlog.client": "RustLogClient RustLogOptions",
    "headrace.clients.tls": "TlsOptions",
    "headrace.errors": """
        AppendUnknown BrokerError ConfigError CorruptData DiskFull EntryExists GroupHasMembers HeadraceError IncompatibleSchema
        InvalidRecord InvalidRequest InvalidSchema InvalidTopicName InvalidTransaction LimitExceeded LoginFailed LoginThrottled
        NoSuchEntry NotAuthorized NotCoordinator OffsetOutOfRange OutOfSequence RecordTooLarge StaleEpoch StorageFailed TopicExists
        Unavailable UnknownDelivery UnknownMessage UnknownPartition UnknownSchema UnknownStage UnknownTopic WireError
    """,
    "headrace.extras": "MissingExtra",
    "headrace.retry": "Backoff exponential",
    "headrace.sync": "SyncClient SyncMessage SyncSubscription SyncTransaction",
}
"""Exported names by the module that defines them."""
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names.split()}


# Hidden from type checkers, which would otherwise accept any misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "sync":
            found: object = importlib.import_module("headrace.sync")
        elif name in _MODULE_OF:
            found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF, "sync"])
