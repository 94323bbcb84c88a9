"""Configuration keys: the kind of value, its choices, default, bounds and description.

A `Kind` parses the content of a file, variable or flag into a typed value, and formats it for a file. A wrong value raises
`ValueError`, whose text says only what is wrong; the caller adds the key and the origin.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from headrace.server.units import format_duration, format_size, parse_duration, parse_size


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


T_co = TypeVar("T_co", covariant=True)
E = TypeVar("E", bound=enum.StrEnum)

Plain = str | int | bool | list[str]
"""A setting as TOML and JSON hold it."""


class Kind(Protocol[T_co]):
    """Parser, formatter and description of one kind of value."""

    @property
    def expected(self) -> str:
        """Description of a valid value, for error messages and `config explain`."""

    def parse(self, raw: object) -> T_co:
        """Return the typed value. `raw` is a TOML value, or the text of a variable or flag."""

    def plain(self, value: Any) -> Plain:
        """Return the value as written in a file."""


def from_text(kind: Kind[object], text: str) -> object:
    """Return the raw value of a variable or flag. A quoted string or a list may be written as in TOML or JSON. Raises `ValueError`."""
    is_list = isinstance(kind, (Binds, Lines, References))
    if not text.startswith(('"', "'", "[") if is_list else ('"', "'")):
        return text
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        if isinstance(kind, Binds) and text.startswith("["):
            return text  # an IPv6 address
        raise ValueError("neither plain text nor a TOML or JSON value") from None
    if len(document) > 1:
        raise ValueError("more than one value")
    return document["value"]


class _Bounded:
    """Whole numbers between two bounds."""

    def __init__(self, low: int, high: int, *, zero: str | None = None) -> None:
        self._low, self._high, self._zero = low, high, zero

    def _check(self, value: int) -> int:
        if value == 0 and self._zero is not None:
            return value
        if not self._low <= value <= self._high:
            raise ValueError("out of bounds")
        return value

    def _bounds(self, low: str, high: str) -> str:
        return f"from {low} to {high}" + (f", or 0: {self._zero}" if self._zero is not None else "")


class Count(_Bounded):
    """A plain number."""

    @property
    def expected(self) -> str:
        return f"a whole number {self._bounds(str(self._low), str(self._high))}"

    def parse(self, raw: object) -> int:
        if isinstance(raw, str) and re.fullmatch(r"\s*[0-9][0-9_]{0,18}\s*", raw, re.ASCII):
            raw = int(raw)
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise ValueError("not a whole number")
        return self._check(raw)

    def plain(self, value: Any) -> Plain:
        return int(value)


class Size(_Bounded):
    """Bytes, written with a unit."""

    @property
    def expected(self) -> str:
        return f'a size such as "64 MiB", {self._bounds(format_size(self._low), format_size(self._high))}'

    def parse(self, raw: object) -> int:
        if isinstance(raw, str):
            return self._check(parse_size(raw))
        if not isinstance(raw, int) or isinstance(raw, bool):
            raise ValueError("not a size")
        return self._check(raw)

    def plain(self, value: Any) -> Plain:
        return format_size(value)


class Duration(_Bounded):
    """Milliseconds, written with a unit."""

    @property
    def expected(self) -> str:
        return f'a duration such as "5ms" or "7d", {self._bounds(format_duration(self._low), format_duration(self._high))}'

    def parse(self, raw: object) -> int:
        if raw == 0 and not isinstance(raw, bool):
            return self._check(0)
        if not isinstance(raw, str):
            raise ValueError("not a duration with a unit")
        return self._check(parse_duration(raw))

    def plain(self, value: Any) -> Plain:
        return format_duration(value)


class Flag:
    """A boolean."""

    expected: Final = "true or false"

    def parse(self, raw: object) -> bool:
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str) and raw.lower() in ("true", "false"):
            return raw.lower() == "true"
        raise ValueError("neither true nor false")

    def plain(self, value: Any) -> Plain:
        return bool(value)


class Choice(Generic[E]):
    """One value of an enumeration."""

    def __init__(self, words: type[E]) -> None:
        self._words = words

    @property
    def expected(self) -> str:
        return "one of " + ", ".join(f'"{word.value}"' for word in self._words)

    def parse(self, raw: object) -> E:
        try:
            return self._words(raw if isinstance(raw, str) else "")
        except ValueError:
            raise ValueError("not one of the choices") from None

    def plain(self, value: Any) -> Plain:
        return str(value)


class Directory:
    """A path. In a file it is relative to the directory of the file, elsewhere to the working directory of the broker."""

    expected: Final = "a path"

    def parse(self, raw: object) -> Path:
        if not isinstance(raw, str) or not raw or "\0" in raw:
            raise ValueError("not a path")
        return Path(raw)

    def plain(self, value: Any) -> Plain:
        return str(value)


class Reference:
    """The name of a file or an environment variable; empty: none. With `is_hidden`, errors do not quote a wrong value: it may be the
    secret itself."""

    def __init__(self, noun: str, pattern: str = r"[^\0]+", *, is_hidden: bool = False) -> None:
        self._noun, self._pattern = noun, re.compile(pattern)
        self.is_hidden = is_hidden
        self.is_path = noun == "the path of a file"

    @property
    def expected(self) -> str:
        return f'{self._noun}, or "" for none'

    def parse(self, raw: object) -> str:
        if not isinstance(raw, str) or (raw and not self._pattern.fullmatch(raw)):
            raise ValueError(f"not {self._noun}")
        return raw

    def plain(self, value: Any) -> Plain:
        return str(value)


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Address:
    """A listener address. Port 0 selects a free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `host:port`, with an IPv6 host in brackets."""
        match = re.fullmatch(r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>[0-9]{1,5})", text.strip(), re.ASCII)
        if match is None or int(match["port"]) > 65_535:
            raise ValueError(f"{text!r} is not HOST:PORT")
        return cls(match["six"] or match["host"], int(match["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Bind:
    """A listener address and its protocols."""

    address: Address
    protocols: tuple[str, ...] = ()
    """Empty: all."""

    def __str__(self) -> str:
        return f"{self.address}={','.join(self.protocols)}" if self.protocols else str(self.address)


class Binds:
    """A list of `HOST:PORT` or `HOST:PORT=protocol,protocol`, separated by commas in the environment."""

    def __init__(self, protocols: Sequence[str], *, kind: str = "TCP", least: int = 1) -> None:
        self._protocols, self._kind, self._least = tuple(protocols), kind, least

    @property
    def expected(self) -> str:
        return (
            'a list of "HOST:PORT" or "HOST:PORT=PROTOCOL,…" (port 0 selects a free port), '
            f"{'at least one' if self._least else 'or none'}; protocols are {', '.join(self._protocols)}"
        )

    def parse(self, raw: object) -> tuple[Bind, ...]:
        if isinstance(raw, str):
            raw = _joined(raw)
        if not isinstance(raw, Sequence) or len(raw) < self._least or not all(isinstance(part, str) for part in raw):
            raise ValueError("not a list of addresses")
        return tuple(map(self._bind, raw))

    def plain(self, value: Any) -> Plain:
        return [str(bind) for bind in value]

    def _bind(self, text: str) -> Bind:
        address, equals, names = text.partition("=")
        protocols = tuple(dict.fromkeys(name.strip() for name in names.split(","))) if equals else ()
        for name in protocols:
            if name not in self._protocols:
                raise ValueError(f"{name!r} is not a protocol of a {self._kind} address")
        return Bind(Address.parse(address), protocols)


class Lines:
    """A list of strings that another module parses, separated by commas in the environment."""

    def __init__(self, shape: str) -> None:
        self._shape = shape

    @property
    def expected(self) -> str:
        return f"a list of {self._shape}, or none"

    def parse(self, raw: object) -> tuple[str, ...]:
        if isinstance(raw, str):
            raw = [part.strip() for part in raw.split(",") if part.strip()]
        if not isinstance(raw, Sequence) or not all(isinstance(part, str) for part in raw):
            raise ValueError("not a list of texts")
        return tuple(raw)

    def plain(self, value: Any) -> Plain:
        return list(value)


def _joined(text: str) -> list[str]:
    """Split at the commas between addresses, not at those between protocols: only an address has a colon."""
    parts: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if ":" in part or not parts:
            parts.append(part)
        else:
            parts[-1] += f",{part}"
    return parts


class References:
    """A list of references to secrets: `file:PATH` or `env:VARIABLE`, optionally after `NAME=` for the owner."""

    expected: Final = 'a list of "file:PATH" or "env:VARIABLE", or with an owner "NAME=file:PATH"'
    _REFERENCE: Final = re.compile(r"(?:(?P<owner>[^=:\s]{1,200})=)?(?P<kind>file|env):(?P<place>[^\0]+)")

    def parse(self, raw: object) -> tuple[SecretReference, ...]:
        if isinstance(raw, str):
            raw = [part for part in map(str.strip, raw.split(",")) if part]
        if not isinstance(raw, Sequence) or not all(isinstance(part, str) for part in raw):
            raise ValueError("not a list of references")
        return tuple(map(self.one, raw))

    def plain(self, value: Any) -> Plain:
        return [str(reference) for reference in value]

    @classmethod
    def one(cls, text: str) -> SecretReference:
        match = cls._REFERENCE.fullmatch(text)
        if match is None:
            # The text is not quoted: it may be a secret written here by mistake.
            raise ValueError("not a reference")
        return SecretReference(match["kind"], match["place"], match["owner"] or "")


@dataclasses.dataclass(frozen=True, slots=True)
class SecretReference:
    """The location of a secret, never the secret itself."""

    kind: str
    """`file` or `env`."""
    place: str
    owner: str = ""

    def __str__(self) -> str:
        return f"{self.owner}={self.kind}:{self.place}" if self.owner else f"{self.kind}:{self.place}"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One key of the configuration."""

    name: str
    """Dotted, as in `storage.ack`."""
    kind: Kind[object]
    default: object
    text: str

    @property
    def variable(self) -> str:
        """The environment variable of the key."""
        return "HEADRACE__" + self.name.replace(".", "__").upper()


def anchored(kind: Kind[object], value: Any, directory: Path) -> Any:
    """Return a value of a file in `directory`, with relative paths resolved against that directory."""
    if isinstance(kind, Directory):
        return directory / value
    if isinstance(kind, Reference) and kind.is_path and value:
        return str(directory / value)
    if isinstance(kind, References):
        return tuple(dataclasses.replace(one, place=str(directory / one.place)) if one.kind == "file" else one for one in value)
    return value


def named_files(kind: Kind[object], value: Any) -> list[Path]:
    """Return the files that a value names and that must exist."""
    if isinstance(kind, Reference) and kind.is_path and value:
        return [Path(value)]
    return [Path(one.place) for one in value if one.kind == "file"] if isinstance(kind, References) else []


def setting(kind: Kind[object], default: object, text: str) -> Any:
    """Return a dataclass field for a key. `default` is written as in a file."""
    return dataclasses.field(default=kind.parse(default), metadata={"kind": kind, "text": text})


def settings_of(tree: type[Any]) -> dict[str, Setting]:
    """Return all keys of a tree of sections in the order of declaration."""
    found: dict[str, Setting] = {}
    for section in dataclasses.fields(tree):
        assert section.default is not dataclasses.MISSING, "every section needs a default"
        for leaf in dataclasses.fields(section.default):
            name = f"{section.name}.{leaf.name}"
            found[name] = Setting(name, leaf.metadata["kind"], leaf.default, leaf.metadata["text"])
    return found
