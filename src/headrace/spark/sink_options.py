"""Options of a write, parsed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.errors import ConfigError
from headrace.flight.client import Servers
from headrace.spark.options import Options
from headrace.spark.retry import TIMEOUT_SECONDS
from headrace.spark.servers import servers_of

APP_ID_BYTES_MAX: Final = 200
"""Longest `txnAppId`; the topic is appended to it."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Parsed options of a write. `of` raises `ConfigError` with the name of a wrong option."""

    servers: Servers
    topic: str = ""
    """Empty: each row has a column `topic`."""
    headers: bool = True
    """Whether to write the column `headers`, as Spark's Kafka sink does by default; `includeHeaders=false` omits it."""
    writer: str = ""
    version: int | None = None
    timeout_seconds: float = TIMEOUT_SECONDS

    @classmethod
    def of(cls, given: Mapping[str, str]) -> SinkOptions:
        options = Options(given)
        writer, version = options.text("txnAppId"), options.count("txnVersion", None, least=0)
        if version is not None and not writer:
            raise ConfigError("option txnVersion needs txnAppId too: set the name of the writer")
        if len(writer.encode()) > APP_ID_BYTES_MAX:
            raise ConfigError(f"option txnAppId has {len(writer.encode())} bytes, at most {APP_ID_BYTES_MAX} are allowed")
        return cls(
            servers=servers_of(options),
            topic=options.text("topic"),
            headers=options.flag("includeHeaders", True),
            writer=writer,
            version=version,
            timeout_seconds=options.duration_ms("kafka.delivery.timeout.ms", int(TIMEOUT_SECONDS * 1000)) / 1000,
        )
