"""Connection options: addresses, login and TLS settings as `Servers`.

The security options of Kafka jobs (`kafka.security.protocol`, JAAS) are accepted. A security option that cannot be applied is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError, InvalidRequest
from headrace.flight.client import Servers
from headrace.spark.options import TEMPORARY_VIEW, Options

TIMEOUT_MS: Final = 30_000
_JAAS: Final = re.compile(r'\b(username|password)\s*=\s*(?:"([^"]*)"|\'([^\']*)\'|([^\s;"\']+))')


def servers_of(options: Options, environment: Mapping[str, str] = os.environ) -> Servers:
    """Parse the connection options. Raises `ConfigError`; its message never contains the password."""
    addresses = options.text("kafka.bootstrap.servers")
    if not addresses:
        missing = 'option kafka.bootstrap.servers is missing: set the address of the Flight endpoint, such as "127.0.0.1:8815"'
        raise ConfigError(missing if options else f"{missing}. If this is a table: {TEMPORARY_VIEW}")
    user, password = _login(options, environment)
    authority = _pem(options, "tls.ca", "truststore")
    certificate, key = _pem(options, "tls.certificate", "keystore"), _pem(options, "tls.key", "keystore")
    if bool(certificate) != bool(key):
        raise ConfigError(f"option {'tls.key' if certificate else 'tls.certificate'} is missing: a client certificate needs its key")
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
            local_files=options.flag("localFiles", True),
            **more,
        )
    except InvalidRequest as failure:
        raise ConfigError(f"option kafka.bootstrap.servers: {failure}") from None


def _login(options: Options, environment: Mapping[str, str]) -> tuple[str, str]:
    mechanism = options.text("kafka.sasl.mechanism", "PLAIN").upper()
    if mechanism != "PLAIN" and not mechanism.startswith("SCRAM-"):
        raise ConfigError(f"option kafka.sasl.mechanism: expected PLAIN or SCRAM-… (user and password), got {mechanism}")
    written = {found[1]: found[2] or found[3] or found[4] or "" for found in _JAAS.finditer(options.text("kafka.sasl.jaas.config"))}
    if "kafka.sasl.jaas.config" in options and written.keys() != {"username", "password"}:
        raise ConfigError('option kafka.sasl.jaas.config needs username="…" and password="…"')
    user = options.text("user") or written.get("username", "")
    password = _password(options, environment) or written.get("password", "")
    if user and not password:
        raise ConfigError("option password is missing: a login needs user and password")
    return user, password


def _password(options: Options, environment: Mapping[str, str]) -> str:
    text, path = options.text("password"), options.text("password.file")
    if text and path:
        raise ConfigError("options password and password.file are both set: set only one")
    if text.startswith("file:"):
        path, text = text.removeprefix("file:"), ""
    if text.startswith("env:"):
        variable = text.removeprefix("env:")
        if variable not in environment:
            raise ConfigError(f"option password: the variable {variable} is not set in the environment of the driver")
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
        raise ConfigError(f"option kafka.security.protocol: expected PLAINTEXT, SSL, SASL_PLAINTEXT or SASL_SSL, got {protocol}")
    return options.flag("tls", protocol.endswith("SSL"))


def _pem(options: Options, name: str, store: str) -> str:
    """Return the path of a PEM file, from our option or Kafka's. It must exist on the driver; executors check it when they connect."""
    kind, stored = options.text(f"kafka.ssl.{store}.type", "PEM").upper(), options.text(f"kafka.ssl.{store}.location")
    if kind != "PEM" or stored.endswith((".jks", ".p12", ".pfx")):
        raise ConfigError(f"option kafka.ssl.{store}.type: only PEM files are supported; set one in {name}")
    path = options.text(name) or stored
    if path and not Path(path).is_file():
        raise ConfigError(f"option {name}: there is no file {path}")
    return path
