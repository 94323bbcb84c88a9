"""The session: its settings, and errors for a missing or old Java."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from headrace.errors import ConfigError
from headrace.flight.client import FlightClient
from headrace.spark.session import check_java, session
from tests.spark.fast_start import bare_spark_home, java_options
from tests.spark.rows import publish
from tests.spark.serving import FlightBroker


def java_home(directory: Path, release: str, *, script: str = "") -> Path:
    (directory / "bin").mkdir()
    (directory / "bin" / "java").write_text(f"#!/bin/sh\n{script}\n")
    (directory / "bin" / "java").chmod(0o755)
    if release:
        (directory / "release").write_text(release)
    return directory


def test_the_session_has_the_settings_for_short_micro_batches(spark: SparkSession) -> None:
    assert spark.conf.get("spark.python.unix.domain.socket.enabled") == "true"
    assert str(spark.conf.get("spark.sql.streaming.checkpointFileManagerClass")).endswith("FileSystemBasedCheckpointFileManager")
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_what_the_caller_sets_wins_over_the_defaults(spark: SparkSession) -> None:
    assert spark.sparkContext.master == "local[2]"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert spark.conf.get("spark.ui.enabled") == "false"


PLAIN = """
import sys
from pyspark.sql import SparkSession

import headrace.spark

servers, topic, java_options = sys.argv[1:]
spark = (
    SparkSession.builder.master("local[1]")
    .config("spark.ui.enabled", "false")
    .config("spark.driver.host", "127.0.0.1")
    .config("spark.driver.extraJavaOptions", java_options)
    .getOrCreate()
)


def load():
    return spark.read.format("headrace").options(servers=servers, subscribe=topic).load()


try:
    load()
except Exception as failure:
    print("DATA_SOURCE_NOT_FOUND" in str(failure))
headrace.spark.register(spark)
load().select("value").write.format("headrace").options(servers=servers, topic=topic).mode("append").save()
print(load().count())
"""


@pytest.mark.spark
def test_register_serves_a_plain_session_in_an_environment_that_is_not_activated(
    broker: FlightBroker, flight_client: FlightClient, fresh_topic: Callable[..., str], tmp_path: Path
) -> None:
    publish(flight_client, topic := fresh_topic(), range(2))
    home = bare_spark_home()
    other = tmp_path / "python3"  # as that of the system: it has no packages except those that Spark passes
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYSPARK_PYTHON", "PYTHONPATH")}
    environment = inherited | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [sys.executable, "-c", PLAIN, broker.address, topic, java_options(home)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "True\n4\n", done.stderr[-4000:]


def test_a_machine_without_java_gets_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="Java 17 or newer.*apt-get install default-jre-headless"):
        check_java()


def test_an_environment_without_pyspark_gets_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(ConfigError, match=r"headrace.spark.session\(\) needs Spark: pip install 'headrace\[spark\]'"):
        session()


@pytest.mark.parametrize("version, major", [("1.8.0_392", 8), ("11.0.2", 11)])
def test_an_old_java_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str, major: int) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_home(tmp_path, f'JAVA_VERSION="{version}"\n')))
    with pytest.raises(ConfigError, match=f"is version {major}: .*JAVA_HOME"):
        check_java()


def test_a_java_without_a_release_file_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = java_home(tmp_path, "", script="""echo 'openjdk version "21.0.1" 2023-10-17' >&2""")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert check_java() == 21


def test_a_java_that_does_not_tell_its_version_is_given_a_chance(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(java_home(tmp_path, "", script="exit 1")))
    assert check_java() == 17
