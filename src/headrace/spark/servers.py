"""From options to `Servers`: where the broker is, who we are, and whom we trust.

A Kafka job says the same in other words (`kafka.security.protocol`, a JAAS text); those words are understood, and what cannot be
honoured is refused: ignoring an option about security would be worse than failing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError, InvalidRequest
from headrace.flight.client import Servers
from headrace.spark.options import Options

TIMEOUT_MS: Final = 30_000
_JAAS: Final = re.compile(r'\b(username|password)\s*=\s*(?:"([^"]*)"|\'([^\']*)\'|([^\s;"\']+))')


def servers_of(options: Options, environment: Mapping[str, str] = os.environ) -> Servers:
    """Raises `ConfigError`; no text of it ever holds the password."""
    addresses = options.text("kafka.bootstrap.servers")
    if not addresses:
        raise ConfigError('option kafka.bootstrap.servers is missing: where the Flight endpoint of the broker is, such as "127.0.0.1:8815"')
    user, password = _login(options, environment)
    authority = _pem(options, "tls.ca", "truststore")
    certificate, key = _pem(options, "tls.certificate", "keystore"), _pem(options, "tls.key", "keystore")
    if bool(certificate) != bool(key):
        raise ConfigError(f"option {'tls.key' if certificate else 'tls.certificate'} is missing: a certificate is shown with its key")
    more = {"tls": True} if _encrypted(options) or authority or certificate else {}
    try:
        return Servers.parse(
            addresses,
            user=user,
            password=password,
            ca_file=authority,
            certificate_file=certificate,
            key_file=key,
            server_name=options.text("tls.serverName"),
            timeout_seconds=options.count("kafka.request.timeout.ms", TIMEOUT_MS) / 1000,
            **more,
        )
    except InvalidRequest as failure:
        raise ConfigError(f"option kafka.bootstrap.servers: {failure}") from None


def _login(options: Options, environment: Mapping[str, str]) -> tuple[str, str]:
    mechanism = options.text("kafka.sasl.mechanism", "PLAIN").upper()
    if mechanism != "PLAIN" and not mechanism.startswith("SCRAM-"):
        raise ConfigError(f"option kafka.sasl.mechanism is {mechanism}: the broker knows users with passwords (PLAIN, SCRAM-…) only")
    written = {found[1]: found[2] or found[3] or found[4] or "" for found in _JAAS.finditer(options.text("kafka.sasl.jaas.config"))}
    if "kafka.sasl.jaas.config" in options and written.keys() != {"username", "password"}:
        raise ConfigError('option kafka.sasl.jaas.config needs username="…" and password="…"')
    user = options.text("user") or written.get("username", "")
    password = _password(options, environment) or written.get("password", "")
    if user and not password:
        raise ConfigError("option password is missing: a login needs both")
    return user, password


def _password(options: Options, environment: Mapping[str, str]) -> str:
    text, path = options.text("password"), options.text("password.file")
    if text and path:
        raise ConfigError("options password and password.file are both given: one is enough")
    if text.startswith("file:"):
        path, text = text.removeprefix("file:"), ""
    if text.startswith("env:"):
        variable = text.removeprefix("env:")
        if variable not in environment:
            raise ConfigError(f"option password: the variable {variable} is not set where the session was started")
        return environment[variable]
    if not path:
        return text
    try:
        return Path(path).read_text("utf-8").strip()
    except OSError as failure:
        raise ConfigError(f"option password.file: {path}: {failure.strerror or failure}") from None


def _encrypted(options: Options) -> bool:
    protocol = options.text("kafka.security.protocol", "PLAINTEXT").upper()
    if protocol not in ("PLAINTEXT", "SASL_PLAINTEXT", "SSL", "SASL_SSL"):
        raise ConfigError(f"option kafka.security.protocol is PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL, not {protocol}")
    return options.flag("tls", protocol.endswith("SSL"))


def _pem(options: Options, name: str, store: str) -> str:
    """A file by our name for it, or by Kafka's. It has to be here; that it is on the executors too is seen when they connect."""
    kind, stored = options.text(f"kafka.ssl.{store}.type", "PEM").upper(), options.text(f"kafka.ssl.{store}.location")
    if kind != "PEM" or stored.endswith((".jks", ".p12", ".pfx")):
        raise ConfigError(f"option kafka.ssl.{store}.type: only PEM files are read; name one in {name}")
    path = options.text(name) or stored
    if path and not Path(path).is_file():
        raise ConfigError(f"option {name}: there is no file {path}")
    return path
