"""Broker with enforced access, to measure the cost of authorization.

Its user `bench` may publish, read and create by its roles and rules. 200 rules about other users make the rule set realistic. Protocols
with a login log in as `bench`; for the others it is the listener's principal.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from headrace.bench.children import Address, Broker, broker
from headrace.bench.errors import BenchFailed
from headrace.bench.load import connected
from headrace.bench.protocols import PROTOCOLS, ProtocolLoad
from headrace.bench.protocols.flymq import FlyMqLoad, call
from headrace.wire.flymq.access_messages import AccessCall, Auth, AuthReply, UserCreate

USER: Final = "bench"
RULES: Final = 200
"""Rules about other users."""


class FlyMqUserLoad(FlyMqLoad):
    """FlyMQ with a login."""

    def __init__(self, password: str) -> None:
        self._password = password

    def handshake(self, sock: socket.socket, key: bytes) -> None:
        log_in(sock, USER, self._password)


@contextmanager
def enforced_broker(directory: Path, ack: str, profile: Path | None = None) -> Iterator[tuple[Broker, str]]:
    """Run the broker and yield it with the password of `bench`. `directory` must not exist yet."""
    directory.mkdir()
    admin, password = secrets.token_urlsafe(), secrets.token_urlsafe()
    file = directory / "admin-password"
    file.touch(mode=0o600)
    file.write_text(admin, "utf-8")
    environment = {
        "HEADRACE__ACCESS__MODE": "enforced",
        "HEADRACE__ACCESS__ADMIN_PASSWORD_FILE": str(file),
        "HEADRACE__FIGG__PRINCIPAL": USER,
        "HEADRACE__RUSTLOG__PRINCIPAL": USER,
    }
    with broker(directory, ack=ack, profile=profile, environment=environment, key_owner=USER) as running:
        _create_user_and_rules(running.address, admin, password)
        yield running, password


def load_of(protocol: str, password: str) -> ProtocolLoad:
    """Return the load of a protocol for the user `bench`."""
    return FlyMqUserLoad(password) if protocol == "flymq" else PROTOCOLS[protocol]


def log_in(sock: socket.socket, user: str, password: str) -> None:
    reply = call(sock, Auth(user, password))
    if not isinstance(reply, AuthReply) or not reply.success:
        raise BenchFailed(f"flymq: login as {user} failed")


def _create_user_and_rules(address: Address, admin: str, password: str) -> None:
    with connected(address) as (sock,):
        log_in(sock, "admin", admin)
        call(sock, UserCreate(USER, password, roles=["producer", "consumer"]))
        _rule(sock, f"user:{USER}", "topic", "bench-")
        for index in range(RULES):
            _rule(sock, f"user:other-{index}", "topic", f"other-{index}-")


def _rule(sock: socket.socket, subject: str, kind: str, prefix: str) -> None:
    body = {"subject": subject, "actions": ["create", "publish", "read"], "kind": kind, "match": "prefix", "name": prefix}
    call(sock, AccessCall("rule.add", json.dumps(body).encode()))
