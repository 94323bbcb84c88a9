"""Spark standalone cluster from the installed package: master, workers and executors are separate processes."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Final

from tests.spark.fast_start import bare_spark_home, java_options

START_SECONDS_MAX: Final = 300.0


class Standalone:
    """Cluster: `with Standalone(directory) as cluster`; a session connects to `cluster.master`."""

    def __init__(self, directory: Path, *, workers: int = 2) -> None:
        self._directory, self._workers = directory, workers
        directory.mkdir(parents=True)
        self.home = bare_spark_home()
        self._java_options = java_options(self.home)
        """SPARK_HOME of the cluster, and of drivers: a Python without packages does not find ours there."""
        self._processes: list[subprocess.Popen[bytes]] = []
        self.master = ""

    def __enter__(self) -> Standalone:
        try:
            log = self._start("master", "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
            self.master = self._wait(log, r"Starting Spark master at (spark://\S+)")
            logs = [
                self._start(
                    f"worker{number}",
                    "org.apache.spark.deploy.worker.Worker",
                    *("--host", "127.0.0.1", "--webui-port", "0", "--cores", "1", "--memory", "768m"),
                    *("--work-dir", str(self._directory / f"work{number}"), self.master),
                )
                for number in range(self._workers)
            ]
            for log in logs:
                self._wait(log, r"Successfully (registered) with master")
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self._stop()

    @property
    def conf(self) -> dict[str, str]:
        """Settings of a session on this cluster."""
        return {
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": self._java_options,
            "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[3]),
        }

    def _start(self, name: str, *command: str) -> Path:
        log = self._directory / f"{name}.log"
        environment = {**os.environ, "SPARK_HOME": str(self.home), "SPARK_LOCAL_IP": "127.0.0.1"}
        environment["SPARK_DAEMON_JAVA_OPTS"] = self._java_options
        environment["SPARK_DAEMON_MEMORY"] = "256m"
        with log.open("wb") as output:
            # A separate process group, which includes the executors of a worker.
            process = subprocess.Popen(
                [str(self.home / "bin" / "spark-class"), *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes.append(process)
        return log

    def _wait(self, log: Path, pattern: str) -> str:
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            text = log.read_text(errors="replace")
            if (found := re.search(pattern, text)) is not None:
                return found[1]
            if any(process.poll() is not None for process in self._processes) or time.monotonic() > deadline:
                raise AssertionError(f"the cluster does not start: {text[-3000:]}")
            time.sleep(0.05)

    def _stop(self) -> None:
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
