"""Every protocol of one broker, and what its protocol carries. A further protocol is one more line in `PEERS`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import headrace
from headrace.clients.connect import Connecting
from headrace.clients.flymq.client import FlyMqOptions
from headrace.clients.fujin.client import FujinOptions
from headrace.clients.options import ClientOptions
from headrace.clients.rustlog.client import RustLogOptions
from headrace.wire import flymq, rustlog
from headrace.wire.fujin import WriteForm
from tests.canaries import secret
from tests.server.process import BrokerProcess

API_KEY = secret("api-key")
WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Peer:
    """Properties of a protocol's client. The matrix compares those that are True."""

    protocol: str
    kind: str = "tcp"
    """Under which word the ready file lists its addresses."""
    writes_keys: bool = False
    writes_empty: bool = True
    """Values of no bytes."""
    reads_keys: bool = False
    reads_offsets: bool = True
    reads_history: bool = True
    """Otherwise only what is published after it has subscribed."""
    has_receipts: bool = False
    """Whether a publish returns its offset."""
    needs_api_key: bool = False
    needs_settlement: bool = False
    dialect: str = ""
    options: ClientOptions | None = None

    def __str__(self) -> str:
        return self.protocol + self.dialect


PEERS = (
    Peer("figg"),
    Peer("rustlog", has_receipts=True),
    Peer("blipmq", reads_offsets=False, reads_history=False, needs_api_key=True, needs_settlement=True),
    Peer("flymq", writes_keys=True, reads_keys=True, has_receipts=True),
)
DIALECTS = (
    Peer("rustlog", has_receipts=True, dialect="-json", options=RustLogOptions(dialect=rustlog.Dialect.JSON)),
    Peer("flymq", writes_keys=True, reads_keys=True, has_receipts=True, dialect="-sdk", options=FlyMqOptions(dialect=flymq.Dialect.SDK)),
)
"""The other ways to say the same."""
QUIC = (
    Peer(
        "fujin",
        kind="quic",
        writes_empty=False,
        needs_settlement=True,
        options=FujinOptions(write_form=WriteForm.NEVER),
    ),
)
"""Without headers: where they are optional, some sizes of a value are ambiguous with a count of headers, and are an error."""
GROUP_PEERS = tuple(peer for peer in PEERS + DIALECTS if peer.protocol in ("flymq", "rustlog"))


class Broker:
    """A broker process whose protocols use one port."""

    def __init__(self, process: BrokerProcess) -> None:
        self.process = process

    @property
    def address(self) -> str:
        """Of its first TCP listener, as HOST:PORT."""
        host, port = self.process.addresses[0]
        return f"{host}:{port}"

    def connect(self, peer: Peer | str) -> Connecting:
        chosen = next(known for known in PEERS + DIALECTS + QUIC if peer in (known, str(known)))
        protocols = self.process.ready["protocols"]
        assert isinstance(protocols, dict)
        url, api_key = f"{chosen.protocol}://{protocols[chosen.kind][0]}", API_KEY if chosen.needs_api_key else None
        return headrace.connect(url, api_key=api_key, options=chosen.options)


@contextmanager
def serving(directory: Path, *arguments: str, quic: bool = True) -> Iterator[Broker]:
    """`quic=False` for a broker that requires client certificates, which it cannot do over QUIC."""
    protocols = ["--blipmq-key", "env:MATRIX_KEY"]
    if quic:
        protocols += ["--listen-quic", "127.0.0.1:0", "--set", "fujin.write_headers=never"]
    with BrokerProcess(directory, *protocols, *arguments, MATRIX_KEY=API_KEY) as process:
        yield Broker(process)
