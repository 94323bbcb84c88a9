"""A Spark session that is set for streams: quick micro-batches, quiet start, times in UTC, the format `headrace` registered.

Every setting is a default: what the caller passes wins. On a cluster file system that renames atomically (HDFS) the default
checkpoint manager of Spark is the better one; `docs/spark.md` says how to have it back.
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
"""What Spark 4 runs on."""

JAVA_COMMAND: Final = "apt-get install default-jre-headless"

SETTINGS: Final = {
    # A Python task answers in small pieces; over TCP each of them waits 40 ms for an acknowledgement that is held back.
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


def session(app: str = "headrace", master: str = "local[*]", **conf: object) -> SparkSession:
    """The session of this process, made if there is none; `**{"spark.sql.shuffle.partitions": 8}` sets more, or overrides."""
    with needs("headrace.spark.session()", "pyspark", "pyarrow", "pandas"):
        from pyspark.sql import SparkSession
    check_java()
    from headrace.spark import register

    if master.startswith("local"):
        # Without it Spark looks up the host's name, and warns about what it finds.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # Workers are started as `python3`, which is another Python, without this package, unless a virtual environment is active. On a
    # cluster too: the driver has workers of its own, and nodes that are set up alike have the same path.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app).master(master)
    for name, value in {**SETTINGS, **conf}.items():
        builder = builder.config(name, _text(value))
    spark = builder.getOrCreate()
    register(spark)
    return spark


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_java() -> int:
    """The major version of the Java that Spark will start; a `ConfigError` that says what to do if there is none, or an old one."""
    java = _java()
    if java is None:
        raise ConfigError(f"Spark needs Java {JAVA_VERSION_MIN} or newer, and there is no java on the PATH or in JAVA_HOME: {JAVA_COMMAND}")
    version = _java_version(java)
    if version is not None and version < JAVA_VERSION_MIN:
        raise ConfigError(
            f"Spark needs Java {JAVA_VERSION_MIN} or newer, and {java} is version {version}: "
            f"{JAVA_COMMAND}, or set JAVA_HOME to a newer one"
        )
    return version or JAVA_VERSION_MIN


def java_version() -> str:
    """Of the Java that Spark would start: a number, "unknown" if it does not say, or "absent"."""
    java = _java()
    return "absent" if java is None else str(_java_version(java) or "unknown")


def _java() -> Path | None:
    """Found as Spark's own scripts find it."""
    home = os.environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    return Path(found) if found and os.access(found, os.X_OK) else None


def _java_version(java: Path) -> int | None:
    """From the file every Java carries, which takes no time to read; else by asking it. None: it does not say."""
    release = java.resolve().parent.parent / "release"
    text = release.read_text("utf-8", errors="replace") if release.is_file() else ""
    if 'JAVA_VERSION="' not in text:
        text = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=False).stderr
    # Up to version 8 the number came second: 1.8.0.
    number = re.search(r'(?:JAVA_VERSION=|version )"(?:1\.)?(\d+)', text)
    return int(number[1]) if number else None
