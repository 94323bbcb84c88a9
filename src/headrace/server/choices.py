"""Enumerations of configuration values."""

from __future__ import annotations

import enum


class LogLevel(enum.StrEnum):
    """Log levels."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """Log line formats."""

    TEXT = "text"
    JSON = "json"


class TlsVersion(enum.StrEnum):
    """Supported TLS versions."""

    V1_2 = "1.2"
    V1_3 = "1.3"


class FujinHeaders(enum.StrEnum):
    """Whether a Fujin WRITE carries headers: the frame itself does not say."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


class QuicRetry(enum.StrEnum):
    """When a QUIC client must confirm its address with a Retry."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class AccessMode(enum.StrEnum):
    """Whether permissions are checked."""

    OPEN = "open"
    ENFORCED = "enforced"


class FlyMqDialect(enum.StrEnum):
    """FlyMQ dialects: the specification and the original implementation differ in a few layouts."""

    SPEC = "spec"
    SDK = "sdk"
    GO = "go"
