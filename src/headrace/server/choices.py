"""What some settings may be, by name."""

from __future__ import annotations

import enum


class LogLevel(enum.StrEnum):
    """How much is said on stderr."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(enum.StrEnum):
    """How it is said."""

    TEXT = "text"
    JSON = "json"


class TlsVersion(enum.StrEnum):
    """Versions of TLS that are still safe to speak."""

    V1_2 = "1.2"
    V1_3 = "1.3"


class FujinHeaders(enum.StrEnum):
    """Nothing in a Fujin WRITE says whether it carries headers."""

    AUTO = "auto"
    NEVER = "never"
    ALWAYS = "always"


class QuicRetry(enum.StrEnum):
    """When a QUIC client has to show that it is where it says it is."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class AccessMode(enum.StrEnum):
    """Whether anybody is asked who they are."""

    OPEN = "open"
    ENFORCED = "enforced"


class FlyMqDialect(enum.StrEnum):
    """The specification and the original implementation of FlyMQ disagree on a few layouts."""

    SPEC = "spec"
    SDK = "sdk"
