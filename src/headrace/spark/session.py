"""Spark session with settings for streams: fast micro-batches, quiet start, times in UTC, the format `headrace` registered.

The caller's settings override these defaults. On a cluster file system with atomic renames (HDFS), Spark's own checkpoint manager is
better; `docs/spark.md` describes how to restore it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from headrace.errors import ConfigError
from headrace.extras import needs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

JAVA_VERSION_MIN: Final = 17
"""Oldest Java for Spark 4."""

JAVA_COMMAND: Final = "apt-get install default-jre-headless"

SETTINGS: Final = {
    # A Python task replies in small chunks; over TCP each of them waits 40 ms for a delayed acknowledgement.
    "spark.python.unix.domain.socket.enabled": "true",
    # The default manager forks a process for every rename of a checkpoint file.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "ERROR",
}


def session(app_name: str = "headrace", master: str = "local[*]", **conf: object) -> SparkSession:
    """Return the session of this process, or create it. `**{"spark.sql.shuffle.partitions": 8}` adds or overrides settings."""
    with needs("headrace.spark.session()", "pyspark", "pyarrow", "pandas"):
        from pyspark.sql import SparkSession
    check_java()
    from headrace.spark import register

    if master.startswith("local"):
        # Without it Spark resolves the host name and logs a warning.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Spark starts workers as `python3`, which lacks this package unless a virtual environment is active. This also holds on a cluster:
    # the driver has its own workers, and nodes with the same setup have the same path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name).master(master)
    for name, value in {**SETTINGS, **conf}.items():
        builder = builder.config(name, _text(value))
    spark = builder.getOrCreate()
    register(spark)
    return spark


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_java() -> int:
    """Return the major version of the Java that Spark starts. Raises `ConfigError` if there is none or it is too old."""
    java = _java()
    if java is None:
        raise ConfigError(f"Spark needs Java {JAVA_VERSION_MIN} or newer, but there is no java on the PATH or in JAVA_HOME: {JAVA_COMMAND}")
    version = _java_version(java)
    if version is not None and version < JAVA_VERSION_MIN:
        raise ConfigError(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer, but {java} is version {version}: "
            f"{JAVA_COMMAND}, or set JAVA_HOME to a newer one"
        )
    return version or JAVA_VERSION_MIN


def java_version() -> str:
    """Return the version of the Java that Spark starts: a number, "unknown" or "absent"."""
    java = _java()
    return "absent" if java is None else str(_java_version(java) or "unknown")


def _java() -> Path | None:
    """Find Java the way Spark's scripts do."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    return Path(found) if found and os.access(found, os.X_OK) else None


def _java_version(java: Path) -> int | None:
    """Read the version from Java's `release` file, which is fast, or else from `java -version`. None if neither has it."""
    release = java.resolve().parent.parent / "release"
    text = release.read_text("utf-8", errors="replace") if release.is_file() else ""
    if 'JAVA_VERSION="' not in text:
        text = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    # Up to version 8 the number came second: 1.8.0.
    number = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    return int(number[1]) if number else None
