"""The options of a write, with their values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.errors import ConfigError
from headrace.flight.client import Servers
from headrace.spark.options import Options
from headrace.spark.servers import servers_of

APP_BYTES_MAX: Final = 200
"""Of `txnAppId`: the topic is added to it."""


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """Taken from what Spark hands over. Raises `ConfigError` with the name of the option that is wrong."""

    servers: Servers
    topic: str = ""
    """Empty: a column says."""
    headers: bool = True
    """As in Spark's Kafka sink, a column `headers` is written without being asked for; `includeHeaders=false` leaves it out."""
    writer: str = ""
    version: int | None = None
    patience_seconds: float = 120.0

    @classmethod
    def of(cls, given: Mapping[str, str]) -> SinkOptions:
        options = Options(given)
        writer, version = options.text("txnAppId"), options.count("txnVersion", None, least=0)
        if version is not None and not writer:
            raise ConfigError("option txnVersion needs txnAppId beside it: whose version is it?")
        if len(writer.encode()) > APP_BYTES_MAX:
            raise ConfigError(f"option txnAppId has {len(writer.encode())} bytes, and may have {APP_BYTES_MAX}")
        return cls(
            servers=servers_of(options),
            topic=options.text("topic"),
            headers=options.flag("includeHeaders", True),
            writer=writer,
            version=version,
            patience_seconds=options.duration_ms("kafka.delivery.timeout.ms", 120_000) / 1000,
        )
