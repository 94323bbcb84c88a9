"""Jars from a manifest: resolved, checked, cached."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from headrace.kafka_server import JarsUnavailable, jars

ONE = hashlib.sha256(b"one").hexdigest()
MANIFEST = f"# org.example:one:1.0\n{ONE}  one-1.0.jar\n"

JAVA = """#!/bin/sh
# Stands in for `java -jar ivy.jar ... -retrieve PATTERN -warn`.
echo called >>"$CALLS"
[ -z "$FAIL" ] || { echo "unresolved dependency"; exit 1; }
while [ "$1" != -retrieve ]; do shift; done
folder=$(dirname "$2")
printf %s "$CONTENT" >"$folder/one-1.0.jar"
"""


@pytest.fixture
def manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a manifest of one jar and put a stand-in for Java on the path."""
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text(JAVA)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("HEADRACE_JARS", str(tmp_path / "cache"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("FAIL", "")
    monkeypatch.setenv("CONTENT", "one")
    path = tmp_path / "example.sha256"
    path.write_text(MANIFEST)
    return path


def calls(manifest: Path) -> int:
    return (manifest.parent / "calls").read_text().count("called")


def test_jars_are_resolved_once_and_then_come_from_the_cache(manifest: Path) -> None:
    first, second = jars.resolved(manifest), jars.resolved(manifest)
    assert first == second and first.parent == manifest.parent / "cache"
    assert (first / "one-1.0.jar").read_bytes() == b"one"
    assert calls(manifest) == 1


def test_a_jar_with_another_hash_is_refused_and_not_cached(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CONTENT", "other")
    with pytest.raises(JarsUnavailable, match="org.example:one:1.0 differ from example.sha256: changed one-1.0.jar"):
        jars.resolved(manifest)
    assert [path.suffix for path in (manifest.parent / "cache").iterdir()] == [".lock"]


def test_a_damaged_jar_in_the_cache_is_resolved_again(manifest: Path) -> None:
    folder = jars.resolved(manifest)
    (folder / "one-1.0.jar").write_bytes(b"damaged")
    assert (jars.resolved(manifest) / "one-1.0.jar").read_bytes() == b"one"
    assert calls(manifest) == 2


def test_a_failed_resolution_says_which_and_repeats_the_reason(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(JarsUnavailable, match="resolving org.example:one:1.0 failed; check the network: unresolved dependency"):
        jars.resolved(manifest)


def test_missing_and_unexpected_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "one-1.0.jar").write_bytes(b"one")
    assert jars.difference(tmp_path, {"one-1.0.jar": ONE}) == ""
    assert jars.difference(tmp_path, {"two-1.0.jar": ONE}) == "missing two-1.0.jar; unexpected one-1.0.jar"


def test_without_java_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JarsUnavailable, match="needs Java 17"):
        jars.java()


def test_the_manifest_of_kafka_names_kafka_and_the_logger_of_failed_starts() -> None:
    coordinates, hashes = jars.read_manifest(jars.KAFKA)
    assert coordinates == ["org.apache.kafka:kafka_2.13:4.3.1", "org.slf4j:slf4j-simple:1.7.36"]
    assert {"kafka_2.13-4.3.1.jar", "slf4j-simple-1.7.36.jar"} < hashes.keys() and len(hashes) == 46
    assert all(len(digest) == 64 for digest in hashes.values())


def test_the_manifest_of_sparks_connector_names_each_jar_alone() -> None:
    coordinates, hashes = jars.read_manifest(jars.SPARK)
    assert all(coordinate.endswith(" alone") for coordinate in coordinates)
    assert hashes.keys() == {"{1}-{2}.jar".format(*coordinate.removesuffix(" alone").split(":")) for coordinate in coordinates}
