"""Broker process with a Flight endpoint, and the settings of a Spark session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.server.process import BrokerProcess
from tests.spark.fast_start import java_options

HURRIED = """
from headrace.engine.embedded import EmbeddedEngine
EmbeddedEngine.__init__.__kwdefaults__["maintain_interval_seconds"] = 0.1
from headrace.cli import main
main()
"""
"""A broker that applies retention ten times a second."""


CONNECT_SETTINGS: Final = {"spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin", "spark.connect.grpc.binding.port": 0}
"""Start a server of Spark Connect in the session's own Java process, on a free port."""


class FlightBroker(BrokerProcess):
    """A broker on free ports with the Flight endpoint open; `listen_flight="127.0.0.1:PORT"` reuses the address of an earlier process."""

    def __init__(
        self,
        directory: Path,
        *arguments: str,
        listen_flight: str = "127.0.0.1:0",
        data: Path | None = None,
        code: str = HURRIED,
        **environment: str,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        log = directory / "broker.log"
        super().__init__(directory, "--listen-flight", listen_flight, *arguments, data=data, code=code, log=log, **environment)  # type: ignore[arg-type]  # texts

    def __enter__(self) -> FlightBroker:
        super().__enter__()
        return self

    @property
    def address(self) -> str:
        """Address of the Flight endpoint, for the option `kafka.bootstrap.servers`."""
        return self.protocol("flight")

    @property
    def tcp(self) -> str:
        """Address of the TCP listener, for the command line."""
        return self.protocol("tcp")

    def command(self, *arguments: str) -> str:
        """Run `headrace ARGUMENTS` against this broker; return its output."""
        command = [sys.executable, "-m", "headrace", *arguments, "--server", self.tcp]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def protocol(self, kind: str) -> str:
        protocols = self.ready["protocols"]
        assert isinstance(protocols, dict)
        return str(protocols[kind][0])


def session_settings(directory: Path) -> dict[str, object]:
    """Return settings for frequent starts and little computation: a small heap, no optimizing compiler, no web UI."""
    return {
        "spark.driver.memory": "768m",
        "spark.driver.extraJavaOptions": f"{java_options()} -Xss4m -Dderby.system.home={directory}",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": False,
        "spark.sql.shuffle.partitions": 2,
        "spark.sql.warehouse.dir": directory / "warehouse",
        "spark.local.dir": directory / "local",
    }
