"""The direction of imports: each station knows only what the table allows.

The table is that of ARCHITECTURE.md. An import inside a function or under `TYPE_CHECKING` counts like any other: what a station
knows is a question of design, not of when the interpreter finds out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
VOCABULARY = {"headrace", "headrace.columns", "headrace.records", "headrace.errors", "headrace.extras", "headrace.limits"}

# For each station: the modules of Headrace it may import, beside itself and the vocabulary. `x.*` means everything below x.
MAY_KNOW: dict[str, set[str]] = {
    "wire": set(),
    "schemas": set(),
    "log": set(),
    "engine": {"headrace.log.*"},
    "broker": {"headrace.engine.contract", "headrace.engine.admission", "headrace.log.batch", "headrace.schemas.*"},
    "access": {"headrace.broker.*", "headrace.engine.contract"},
    "sessions": {"headrace.wire.*", "headrace.broker.*", "headrace.access.*"},
    "net": {"headrace.sessions.contract", "headrace.wire.sniff"},
    # A QUIC connection is the same thing from both ends, and its library has one home.
    "clients": {"headrace.wire.*", "headrace.net.quic_carrier", "headrace.net.quic_endpoint"},
    # The server's side knows the broker; `bulk.client` and what it shares with the server know nothing but Arrow.
    "bulk": {"headrace.broker.*", "headrace.access.*", "headrace.engine.contract", "headrace.log.batch"},
    # A task on an executor decodes values by itself: the schemas are code without I/O.
    "spark": {"headrace.bulk.client", "headrace.schemas.*"},
    "arrow": {"headrace.bulk.client"},
    "server": {
        "headrace.sessions.*",
        "headrace.net.*",
        "headrace.broker.*",
        "headrace.access.*",
        "headrace.engine.*",
        "headrace.log.*",
        "headrace.wire.*",
        "headrace.bulk.*",
    },
    "cli": {
        "headrace.server.*",
        "headrace.clients.*",
        "headrace.spark.*",
        "headrace.demo.*",
        "headrace.bulk.client",
        "headrace.wire.*",
        "headrace.bench.cli",
        "headrace.engine.contract",
        # The offline commands are a door of their own to the files; the rest of the log stays unknown to people.
        "headrace.log.check",
        "headrace.log.dump",
        "headrace.log.files",
        "headrace.log.crypt",
        "headrace.log.identity",
    },
    "bench": {"headrace.*"},
    # The story is told from outside: it starts the programs a user would start, and talks to them as a user would.
    "demo": {"headrace.clients.*", "headrace.bulk.client", "headrace.programs"},
    "programs": set(),
    "__main__": {"headrace.cli"},
}

# A library that only some stations may import. What is not named here is free to use where the station's own rule allows it.
HOMES: dict[str, set[str]] = {
    "click": {"cli", "bench"},
    "rich": {"cli", "bench", "demo"},
    "uvloop": {"server", "cli", "bench"},
    "google_crc32c": {"log"},
    "backports": {"log"},
    "compression": {"log"},
    "argon2": {"access"},
    "cryptography": {"log", "server", "net"},
    "aioquic": {"net"},
    "OpenSSL": {"net"},
    "jsonschema_rs": {"schemas"},
    "fastavro": {"schemas"},
    "google": {"schemas"},
    "pyspark": {"spark", "bench"},
    "pyarrow": {"spark", "bulk", "arrow", "bench"},
    "numpy": {"bulk", "spark", "bench"},
    "deltalake": {"spark", "demo"},
    "pyiceberg": {"spark"},
    "confluent_kafka": {"engine"},
    "nats": {"engine", "bench"},
    "nats_server": {"bench"},
    "hdrh": {"bench"},
    "psutil": {"bench"},
    "redis": {"bench"},
}

CLOCKS_AND_DICE = {"time", "random", "uuid", "secrets"}
LOOPS_AND_SOCKETS = {"asyncio", "socket", "ssl", "selectors", "threading", "concurrent"}
MUST_NOT_IMPORT: dict[str, set[str]] = {
    "wire": CLOCKS_AND_DICE | LOOPS_AND_SOCKETS,
    "schemas": CLOCKS_AND_DICE | LOOPS_AND_SOCKETS,
    "log": CLOCKS_AND_DICE | {"asyncio", "socket", "ssl"},
    "engine": CLOCKS_AND_DICE | {"socket", "ssl"},
    "broker": CLOCKS_AND_DICE | {"socket", "ssl", "threading"},
    "access": CLOCKS_AND_DICE | {"socket", "ssl", "threading"},
    "sessions": {"random", "uuid", "secrets", "socket", "ssl", "threading"},
    "clients": {"random", "uuid"},
}


def imports_of(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """(line, full name) of everything a file imports; `from a import b` may mean the module a.b, so both are yielded."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                base = ".".join([*parents[: len(parents) - node.level + 1], *([base] if base else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def is_allowed(name: str, allowed: set[str]) -> bool:
    """`name` may be a module or something inside one."""
    parent = name.rpartition(".")[0]
    if name in allowed or parent in allowed:
        return True
    return any(name.startswith(rule[:-1]) or name == rule[:-2] for rule in allowed if rule.endswith(".*"))


def judge(module: str, name: str) -> str | None:
    """What is wrong with `module` importing `name`, if anything."""
    parts = module.split(".")
    station = parts[1]
    top = name.split(".")[0]
    if top != "headrace":
        if station not in HOMES.get(top, {station}):
            return f"{top} belongs to {' and '.join(sorted(HOMES[top]))}"
        if top in MUST_NOT_IMPORT.get(station, set()):
            return f"{station} must not know {top}"
        return None
    if name in VOCABULARY or name.rpartition(".")[0] in VOCABULARY:
        # `from headrace import wire` would slip through as an attribute of the package.
        inside = name.split(".")[1:2]
        if inside and inside[0] in MAY_KNOW and inside[0] != station and not is_allowed(name, MAY_KNOW[station]):
            return f"{station} must not know {inside[0]}"
        return None
    target = name.split(".")[1]
    if target == station:
        if station in ("wire", "sessions") and len(parts) > 2:
            return _other_protocol(parts[2], name.split(".")[2])
        return None
    if not is_allowed(name, MAY_KNOW[station]):
        return f"{station} must not know {name}"
    if station == "sessions" and target == "wire":
        return _other_protocol(parts[2], name.split(".")[2])
    return None


PROTOCOLS = {"figg", "rustlog", "blipmq", "flymq", "fujin"}


def _other_protocol(own: str, other: str) -> str | None:
    """One protocol does not know another; what is shared has a name of its own. `figg_tables` belongs to figg."""
    own, other = own.partition("_")[0], other.partition("_")[0]
    if own in PROTOCOLS and other in PROTOCOLS and own != other:
        return f"{own} must not know {other}"
    return None


def violations(source: Path) -> list[str]:
    """One line for each import against the table, and for each station that is not in it."""
    found: list[str] = []
    for path in sorted(source.glob("headrace/**/*.py")):
        relative = path.relative_to(source)
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        if module in VOCABULARY:
            # The package itself is where users find the clients; it names them for type checkers and imports them when asked.
            allowed = {"headrace.clients.*"} if module == "headrace" else set()
            wrong = [
                name
                for _, name in imports_of(path, module)
                if name.startswith("headrace.") and name.rpartition(".")[0] not in VOCABULARY and not is_allowed(name, allowed)
            ]
            found += [f"{relative}: the vocabulary must not know {name}" for name in wrong]
            continue
        if module.split(".")[1] not in MAY_KNOW:
            found.append(f"{relative}: station {module.split('.')[1]} is not in the table")
            continue
        for line, name in imports_of(path, module):
            if wrong_because := judge(module, name):
                found.append(f"{relative}:{line}: {wrong_because}")
    return found


def test_every_import_goes_in_the_direction_of_the_table() -> None:
    assert violations(SOURCE) == []


def test_the_walk_sees_the_whole_tree() -> None:
    seen = {path.relative_to(SOURCE).parts[1] for path in SOURCE.glob("headrace/**/*.py")}
    assert {"wire", "log", "engine", "broker", "sessions", "net", "clients", "server", "cli"} <= seen


@pytest.mark.parametrize(
    ("path", "line", "because"),
    [
        ("wire/figg/decoder.py", "import asyncio", "wire must not know asyncio"),
        ("wire/figg/decoder.py", "from headrace.broker.broker import Broker", "wire must not know headrace.broker.broker.Broker"),
        ("wire/figg/decoder.py", "from headrace import broker", "wire must not know broker"),
        ("wire/figg/decoder.py", "from headrace.wire.blipmq import frames", "figg must not know blipmq"),
        ("log/store.py", "import time", "log must not know time"),
        ("log/store.py", "from headrace.engine.contract import Ack", "log must not know headrace.engine.contract.Ack"),
        ("engine/embedded.py", "from headrace.broker import topics", "engine must not know headrace.broker.topics"),
        ("broker/groups.py", "import random", "broker must not know random"),
        (
            "broker/groups.py",
            "from headrace.engine.embedded import EmbeddedEngine",
            "broker must not know headrace.engine.embedded.EmbeddedEngine",
        ),
        ("broker/groups.py", "def late():\n    from uuid import uuid4", "broker must not know uuid"),
        ("sessions/figg.py", "from headrace.wire import rustlog", "figg must not know rustlog"),
        ("sessions/figg.py", "from headrace.sessions.blipmq import Session", "figg must not know blipmq"),
        ("sessions/figg_tables.py", "from headrace.wire.blipmq import frames", "figg must not know blipmq"),
        ("sessions/figg.py", "import socket", "sessions must not know socket"),
        ("net/listener.py", "from headrace.sessions.figg import FiggSession", "net must not know headrace.sessions.figg.FiggSession"),
        ("net/listener.py", "from ..wire.figg import frames", "net must not know headrace.wire.figg.frames"),
        ("clients/figg.py", "from headrace.broker.broker import Broker", "clients must not know headrace.broker.broker.Broker"),
        ("spark/source.py", "from headrace.log.batch import Batch", "spark must not know headrace.log.batch.Batch"),
        ("server/wiring.py", "import pyspark.sql", "pyspark belongs to bench and spark"),
        ("server/wiring.py", "from headrace.cli import cli", "server must not know headrace.cli.cli"),
        ("cli/config.py", "from headrace.log.store import Store", "cli must not know headrace.log.store.Store"),
        ("errors.py", "from headrace.log import batch", "the vocabulary must not know headrace.log.batch"),
        ("mill/wheel.py", "import os", "station mill is not in the table"),
    ],
)
def test_a_planted_violation_is_named(tmp_path: Path, path: str, line: str, because: str) -> None:
    planted = tmp_path / "headrace" / path
    planted.parent.mkdir(parents=True)
    planted.write_text(f'"""Planted."""\n\n{line}\n')
    assert [text.partition(": ")[2] for text in violations(tmp_path)] == [because]


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("wire/figg/decoder.py", "from headrace.errors import WireError"),
        ("wire/figg/decoder.py", "from headrace import limits"),
        ("wire/figg/decoder.py", "from headrace.wire.figg import frames"),
        ("sessions/figg.py", "from headrace.wire.figg import frames"),
        ("sessions/figg.py", "from headrace.broker.broker import Broker"),
        ("net/listener.py", "from headrace.sessions.contract import Link"),
        ("engine/embedded.py", "from headrace.log.store import Store"),
        ("server/wiring.py", "import uvloop"),
    ],
)
def test_an_import_down_the_stream_is_fine(tmp_path: Path, path: str, line: str) -> None:
    planted = tmp_path / "headrace" / path
    planted.parent.mkdir(parents=True)
    planted.write_text(f"{line}\n")
    assert violations(tmp_path) == []
