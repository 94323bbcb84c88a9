"""Import rules: each package imports only what the table allows.

The table is that of ARCHITECTURE.md. An import inside a function or under `TYPE_CHECKING` counts like any other, because the rule is
about design, not about load time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"
VOCABULARY = {
    "headrace",
    "headrace.columns",
    "headrace.compiled",
    "headrace.record_batch",
    "headrace.records",
    "headrace.errors",
    "headrace.extras",
    "headrace.histogram",
    "headrace.limits",
    "headrace.located",
    "headrace.overview",
}

# For each package: the modules of Headrace it may import, besides itself and the shared types. `x.*` means everything below x.
MAY_KNOW: dict[str, set[str]] = {
    "wire": set(),
    "schemas": set(),
    "storage": set(),
    "engine": {"headrace.storage.*"},
    "broker": {"headrace.engine.contract", "headrace.engine.checks", "headrace.schemas.*"},
    "access": {"headrace.broker.*", "headrace.engine.contract"},
    "sessions": {"headrace.wire.*", "headrace.broker.*", "headrace.access.*"},
    "net": {"headrace.sessions.contract", "headrace.wire.sniff"},
    # Both roles of a QUIC connection use the same code, and one package imports the library.
    "clients": {"headrace.retry", "headrace.wire.*", "headrace.net.quic.connection", "headrace.net.quic.endpoint"},
    # The server side imports the broker; `flight.client` and the modules it has in common with the server import only Arrow.
    "flight": {"headrace.retry", "headrace.broker.*", "headrace.access.*", "headrace.engine.contract"},
    # A task on an executor decodes values itself: the schemas are code without I/O.
    "spark": {"headrace.retry", "headrace.heap", "headrace.arrow.*", "headrace.flight.client", "headrace.schemas.*"},
    "arrow": {"headrace.flight.client", "headrace.schemas.*"},
    "server": {
        "headrace.heap",
        "headrace.sessions.*",
        "headrace.net.*",
        "headrace.broker.*",
        "headrace.access.*",
        "headrace.engine.*",
        "headrace.storage.*",
        "headrace.wire.*",
        "headrace.flight.*",
        # The metrics have the progress of the pipelines of this machine, which their executions write to files.
        "headrace.spark.pipelines.executions",
    },
    "cli": {
        "headrace.server.*",
        "headrace.clients.*",
        "headrace.spark.*",
        "headrace.demo.*",
        "headrace.flight.client",
        "headrace.arrow.copying",
        "headrace.programs",
        "headrace.wire.*",
        "headrace.bench.cli",
        "headrace.console.*",
        "headrace.engine.contract",
        # The offline commands read files directly; no other command imports storage.
        "headrace.storage.check",
        "headrace.storage.files",
        "headrace.storage.crypt",
        "headrace.storage.identity",
    },
    # The console is a client; it reads the status files of pipelines as `headrace pipeline` does, and decodes values with the schemas.
    "console": {
        "headrace.clients.*",
        "headrace.wire.flymq.access_messages",
        "headrace.schemas.*",
        "headrace.spark.pipelines.executions",
        "headrace.server.units",
    },
    "bench": {"headrace.*"},
    # The demo works from outside: it starts programs and connects to them as a user would.
    "demo": {"headrace.clients.*", "headrace.flight.client", "headrace.programs", "headrace.kafka_server"},
    "sync": {"headrace.clients.*"},
    "programs": set(),
    "kafka_server": {"headrace.programs"},
    "retry": set(),
    "heap": set(),
    "__main__": {"headrace.cli"},
}

# Libraries that only some packages may import. Others may be used where the rule of the package allows it.
HOMES: dict[str, set[str]] = {
    "click": {"cli", "bench"},
    "rich": {"cli", "bench", "demo"},
    "uvloop": {"server", "cli", "bench"},
    "google_crc32c": {"storage", "engine", "flight"},
    "re2": {"sessions"},
    "backports": {"storage"},
    "compression": {"storage"},
    "argon2": {"access"},
    "cryptography": {"storage", "server", "net"},
    "aioquic": {"net"},
    "OpenSSL": {"net"},
    "jsonschema_rs": {"schemas"},
    "fastavro": {"schemas"},
    "google": {"schemas"},
    "pyspark": {"spark", "bench"},
    "pyarrow": {"spark", "flight", "arrow", "bench"},
    "numpy": {"flight", "spark", "bench"},
    "deltalake": {"spark", "demo"},
    "pyiceberg": {"spark"},
    "aiokafka": {"engine", "server", "bench"},
    "confluent_kafka": {"bench"},
    "nats": {"engine", "bench"},
    "nats_server": {"bench"},
    "hdrh": {"bench"},
    "psutil": {"bench"},
    "starlette": {"console"},
    "uvicorn": {"console"},
    "jinja2": {"console"},
    "markupsafe": {"console"},
    "multipart": {"console"},
    "redis": {"bench"},
    "prometheus_client": {"server"},
    "opentelemetry": {"server", "spark"},
}

CLOCKS_AND_DICE = {"time", "random", "uuid", "secrets"}
LOOPS_AND_SOCKETS = {"asyncio", "socket", "ssl", "selectors", "threading", "concurrent"}
MUST_NOT_IMPORT: dict[str, set[str]] = {
    "wire": CLOCKS_AND_DICE | LOOPS_AND_SOCKETS,
    "schemas": CLOCKS_AND_DICE | LOOPS_AND_SOCKETS,
    "storage": CLOCKS_AND_DICE | {"asyncio", "socket", "ssl"},
    "engine": CLOCKS_AND_DICE | {"socket", "ssl"},
    "broker": CLOCKS_AND_DICE | {"socket", "ssl", "threading"},
    "access": CLOCKS_AND_DICE | {"socket", "ssl", "threading"},
    "sessions": {"random", "uuid", "secrets", "socket", "ssl", "threading"},
    "clients": {"random", "uuid"},
}


def imports_of(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Yield (line, full name) of all imports of a file; `from a import b` may mean the module a.b, so both are yielded."""
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
    """Return whether `name`, a module or an attribute of one, is allowed."""
    parent = name.rpartition(".")[0]
    if name in allowed or parent in allowed:
        return True
    return any(name.startswith(rule[:-1]) or name == rule[:-2] for rule in allowed if rule.endswith(".*"))


def judge(module: str, name: str) -> str | None:
    """Return why `module` must not import `name`, or None."""
    parts = module.split(".")
    package = parts[1]
    top = name.split(".")[0]
    if top != "headrace":
        if package not in HOMES.get(top, {package}):
            return f"{top} belongs to {' and '.join(sorted(HOMES[top]))}"
        if top in MUST_NOT_IMPORT.get(package, set()):
            return f"{package} must not import {top}"
        return None
    if name in VOCABULARY or name.rpartition(".")[0] in VOCABULARY:
        # `from headrace import wire` would otherwise pass as an attribute of the package.
        inside = name.split(".")[1:2]
        if inside and inside[0] in MAY_KNOW and inside[0] != package and not is_allowed(name, MAY_KNOW[package]):
            return f"{package} must not import {inside[0]}"
        return None
    target = name.split(".")[1]
    if target == package:
        if package in ("wire", "sessions") and len(parts) > 2:
            return _other_protocol(parts[2], name.split(".")[2])
        return None
    if not is_allowed(name, MAY_KNOW[package]):
        return f"{package} must not import {name}"
    if package == "sessions" and target == "wire":
        return _other_protocol(parts[2], name.split(".")[2])
    return None


PROTOCOLS = {"figg", "rustlog", "blipmq", "flymq", "fujin"}


def _other_protocol(own: str, other: str) -> str | None:
    """Return an error if two modules belong to different protocols, else None. `figg_tables` belongs to figg."""
    own, other = own.partition("_")[0], other.partition("_")[0]
    if own in PROTOCOLS and other in PROTOCOLS and own != other:
        return f"{own} must not import {other}"
    return None


def violations(source: Path) -> list[str]:
    """Return one line for each forbidden import, and for each package that is not in the table."""
    found: list[str] = []
    for path in sorted(source.glob("headrace/**/*.py")):
        relative = path.relative_to(source)
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        if module in VOCABULARY:
            # The top-level package exports the clients; it names them for type checkers and imports them on demand.
            allowed = {"headrace.clients.*", "headrace.retry", "headrace.sync"} if module == "headrace" else set()
            wrong = [
                name
                for _, name in imports_of(path, module)
                if name.startswith("headrace.") and name.rpartition(".")[0] not in VOCABULARY and not is_allowed(name, allowed)
            ]
            found += [f"{relative}: the vocabulary must not import {name}" for name in wrong]
            continue
        if module.split(".")[1] not in MAY_KNOW:
            found.append(f"{relative}: package {module.split('.')[1]} is not in the table")
            continue
        for line, name in imports_of(path, module):
            if wrong_because := judge(module, name):
                found.append(f"{relative}:{line}: {wrong_because}")
    return found


def test_every_import_goes_in_the_direction_of_the_table() -> None:
    assert violations(SOURCE) == []


def test_the_walk_sees_the_whole_tree() -> None:
    seen = {path.relative_to(SOURCE).parts[1] for path in SOURCE.glob("headrace/**/*.py")}
    assert {"wire", "storage", "engine", "broker", "sessions", "net", "clients", "server", "cli"} <= seen


@pytest.mark.parametrize(
    ("path", "line", "because"),
    [
        ("wire/figg/decoder.py", "import asyncio", "wire must not import asyncio"),
        ("wire/figg/decoder.py", "from headrace.broker.broker import Broker", "wire must not import headrace.broker.broker.Broker"),
        ("wire/figg/decoder.py", "from headrace import broker", "wire must not import broker"),
        ("wire/figg/decoder.py", "from headrace.wire.blipmq import frames", "figg must not import blipmq"),
        ("storage/store.py", "import time", "storage must not import time"),
        ("storage/store.py", "from headrace.engine.contract import Ack", "storage must not import headrace.engine.contract.Ack"),
        ("engine/embedded.py", "from headrace.broker import topics", "engine must not import headrace.broker.topics"),
        ("broker/groups/offsets.py", "import random", "broker must not import random"),
        (
            "broker/groups/offsets.py",
            "from headrace.engine.embedded import EmbeddedEngine",
            "broker must not import headrace.engine.embedded.EmbeddedEngine",
        ),
        ("broker/groups/offsets.py", "def late():\n    from uuid import uuid4", "broker must not import uuid"),
        ("sessions/figg/session.py", "from headrace.wire import rustlog", "figg must not import rustlog"),
        ("sessions/figg/session.py", "from headrace.sessions.blipmq.session import Session", "figg must not import blipmq"),
        ("sessions/figg_tables.py", "from headrace.wire.blipmq import frames", "figg must not import blipmq"),
        ("sessions/figg/session.py", "import socket", "sessions must not import socket"),
        (
            "net/listener.py",
            "from headrace.sessions.figg.session import FiggSession",
            "net must not import headrace.sessions.figg.session.FiggSession",
        ),
        ("net/listener.py", "from ..wire.figg import frames", "net must not import headrace.wire.figg.frames"),
        ("clients/figg/client.py", "from headrace.broker.broker import Broker", "clients must not import headrace.broker.broker.Broker"),
        ("spark/source.py", "from headrace.storage.batch import Batch", "spark must not import headrace.storage.batch.Batch"),
        ("server/wiring.py", "import pyspark.sql", "pyspark belongs to bench and spark"),
        ("server/wiring.py", "from headrace.cli import cli", "server must not import headrace.cli.cli"),
        ("cli/config.py", "from headrace.storage.store import Store", "cli must not import headrace.storage.store.Store"),
        ("errors.py", "from headrace.storage import batch", "the vocabulary must not import headrace.storage.batch"),
        ("mill/wheel.py", "import os", "package mill is not in the table"),
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
        ("sessions/figg/session.py", "from headrace.wire.figg import frames"),
        ("sessions/figg/session.py", "from headrace.broker.broker import Broker"),
        ("net/listener.py", "from headrace.sessions.contract import Link"),
        ("engine/embedded.py", "from headrace.storage.store import Store"),
        ("server/wiring.py", "import uvloop"),
    ],
)
def test_an_import_down_the_stream_is_fine(tmp_path: Path, path: str, line: str) -> None:
    planted = tmp_path / "headrace" / path
    planted.parent.mkdir(parents=True)
    planted.write_text(f"{line}\n")
    assert violations(tmp_path) == []
