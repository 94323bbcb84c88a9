"""Headrace: a durable message log with several wire protocols.

    import headrace

    async with headrace.connect("flymq://127.0.0.1") as client:
        receipt = await client.publish("demo", b"hello")

The names below are imported on first use: `import headrace` alone stays cheap, above all for the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

__version__ = "0.1.0"

if TYPE_CHECKING:
    from headrace.clients import sync as sync
    from headrace.clients.api import Client as Client
    from headrace.clients.api import Subscription as Subscription
    from headrace.clients.connect import connect as connect
    from headrace.clients.errors import AlreadySubscribed as AlreadySubscribed
    from headrace.clients.errors import ClientClosed as ClientClosed
    from headrace.clients.errors import ClientError as ClientError
    from headrace.clients.errors import ConnectFailed as ConnectFailed
    from headrace.clients.errors import InvalidUrl as InvalidUrl
    from headrace.clients.errors import NothingToSettle as NothingToSettle
    from headrace.clients.errors import NotSent as NotSent
    from headrace.clients.errors import NotSupported as NotSupported
    from headrace.clients.errors import OutcomeUnknown as OutcomeUnknown
    from headrace.clients.errors import Refused as Refused
    from headrace.clients.messages import ConnectionState as ConnectionState
    from headrace.clients.messages import Message as Message
    from headrace.clients.messages import MessageBatch as MessageBatch
    from headrace.clients.messages import Receipt as Receipt
    from headrace.clients.sync import SyncClient as SyncClient
    from headrace.clients.sync import SyncSubscription as SyncSubscription
    from headrace.errors import HeadraceError as HeadraceError
    from headrace.retry import exponential as exponential

_MODULES: Final = {
    "headrace.clients.api": ("Client", "Subscription"),
    "headrace.retry": ("exponential",),
    "headrace.clients.connect": ("connect",),
    "headrace.clients.errors": (
        "AlreadySubscribed",
        "ClientClosed",
        "ClientError",
        "ConnectFailed",
        "InvalidUrl",
        "NotSent",
        "NotSupported",
        "NothingToSettle",
        "OutcomeUnknown",
        "Refused",
    ),
    "headrace.clients.messages": ("ConnectionState", "Message", "MessageBatch", "Receipt"),
    "headrace.clients.sync": ("SyncClient", "SyncSubscription"),
    "headrace.errors": ("HeadraceError",),
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}


# Hidden from type checkers, which would otherwise accept any misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name == "sync":
            found: object = importlib.import_module("headrace.clients.sync")
        elif name in _MODULE_OF:
            found = getattr(importlib.import_module(_MODULE_OF[name]), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF, "sync"])
