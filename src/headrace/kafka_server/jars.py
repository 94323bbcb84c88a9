"""Jars from Maven coordinates, checked and cached.

A manifest names the coordinates and every file with its SHA-256:

    # org.apache.kafka:kafka_2.13:4.3.1
    22d1d431…  HdrHistogram-2.2.2.jar

With the word `alone` after a coordinate, its dependencies are left out.

The Apache Ivy in PySpark resolves the coordinates. A directory enters the cache only if it holds exactly the files of its manifest. The
cache is `HEADRACE_JARS`, by default `headrace/jars` in the user's cache directory.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).parent
KAFKA: Final = HERE / "kafka.sha256"
TOOLS: Final = HERE / "kafka-tools.sha256"
"""Kafka's load generator. It runs with the jars of Kafka."""
SPARK: Final = HERE / "spark-kafka.sha256"
"""Spark's Kafka connector. Maven Central has none for Spark 4.3; the newest one and the newest token provider it can resolve run there."""
RESOLVE_SECONDS_MAX: Final = 600


class JarsUnavailable(Exception):
    """Java, the resolver or a jar is missing, or a jar is not the one of the manifest."""


def java() -> str:
    """Return the path of the Java program."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else shutil.which("java")
    if found is None:
        raise JarsUnavailable("Kafka needs Java 17; no java in JAVA_HOME or PATH. Install it, for example openjdk-17-jre-headless")
    return found


def cache_folder() -> Path:
    """Return the directory that keeps jars between executions."""
    chosen = os.environ.get("HEADRACE_JARS")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "jars"


def resolved(manifest: Path, cache: Path | None = None) -> Path:
    """Return a directory with the files of `manifest`, resolving them on the first call."""
    coordinates, hashes = read_manifest(manifest)
    identity = hashlib.sha256(manifest.read_bytes()).hexdigest()[:12]
    folder = (cache or cache_folder()) / f"{manifest.stem}-{identity}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        if not folder.is_dir() or difference(folder, hashes):
            shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="resolving-") as scratch:
                found = Path(scratch) / "found"
                _resolve(coordinates, found, Path(scratch) / "ivy")
                wrong = difference(found, hashes)
                if wrong:
                    raise JarsUnavailable(f"the jars of {', '.join(coordinates)} differ from {manifest.name}: {wrong}")
                found.rename(folder)
    return folder


def read_manifest(manifest: Path) -> tuple[list[str], dict[str, str]]:
    """Return the coordinates and the SHA-256 of each file name."""
    coordinates, hashes = [], {}
    for line in manifest.read_text("ascii").splitlines():
        if line.startswith("# "):
            coordinates.append(line[2:])
        else:
            digest, name = line.split()
            hashes[name] = digest
    return coordinates, hashes


def difference(folder: Path, hashes: dict[str, str]) -> str:
    """Return which files are missing, unexpected or changed; an empty string if none are."""
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.jar")}
    if found == hashes:
        return ""
    wrong = {
        "missing": hashes.keys() - found.keys(),
        "unexpected": found.keys() - hashes.keys(),
        "changed": {name for name in found.keys() & hashes.keys() if found[name] != hashes[name]},
    }
    return "; ".join(f"{what} {', '.join(sorted(names))}" for what, names in wrong.items() if names)


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the lock beside `path`, so that processes that start together resolve once."""
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _resolve(coordinates: list[str], target: Path, ivy_cache: Path) -> None:
    target.mkdir()
    for each in coordinates:
        retrieve = str(target / "[artifact]-[revision].[ext]")
        coordinate, _, alone = each.partition(" ")
        command = [java(), "-jar", str(_ivy()), "-cache", str(ivy_cache), "-dependency", *coordinate.split(":")]
        command += ["-notransitive"] if alone else []
        try:
            done = subprocess.run(
                [*command, "-confs", "default", "-retrieve", retrieve, "-warn"],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=RESOLVE_SECONDS_MAX,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise JarsUnavailable(f"resolving {each} took longer than {RESOLVE_SECONDS_MAX} s; check the network") from error
        if done.returncode:
            said = [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith("..")]
            raise JarsUnavailable(f"resolving {each} failed; check the network: {' | '.join(said[-3:])}")


def _ivy() -> Path:
    spark = importlib.util.find_spec("pyspark")
    jars = sorted((Path(spark.origin).parent / "jars").glob("ivy-*.jar")) if spark and spark.origin else []
    if not jars:
        raise JarsUnavailable("the resolver comes with PySpark; install headrace[spark]")
    return jars[-1]
