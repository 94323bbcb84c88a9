"""What a configuration key is: a kind of value, a default, bounds, and a text that explains it.

A `Kind` turns what a file, the environment or a flag holds into a typed value, and back into what a file would hold.
A wrong value raises `ValueError` whose text is only what is wrong; the caller knows the key and where the value came from.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from headrace.server.units import format_duration, format_size, parse_duration, parse_size

T_co = TypeVar("T_co", covariant=True)
E = TypeVar("E", bound=enum.StrEnum)

Plain = str | int | bool | list[str]
"""What TOML and JSON can hold of a setting."""


class Kind(Protocol[T_co]):
    """How values of one kind are read, written and described."""

    @property
    def expected(self) -> str:
        """What a valid value is, for error lines and `config explain`."""

    def parse(self, raw: object) -> T_co:
        """The typed value; `raw` is what TOML holds, or the text of a variable or flag."""

    def plain(self, value: Any) -> Plain:
        """The value as a file would hold it."""


class _Bounded:
    """Whole numbers between two bounds; the subclasses differ in how people write them."""

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
    """Yes or no."""

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
    """One word of a few."""

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
    """A path; relative ones are relative to where the broker is started."""

    expected: Final = "a path"

    def parse(self, raw: object) -> Path:
        if not isinstance(raw, str) or not raw or "\0" in raw:
            raise ValueError("not a path")
        return Path(raw)

    def plain(self, value: Any) -> Plain:
        return str(value)


class Reference:
    """The name of something that is elsewhere (a file, an environment variable); empty means: none. `is_hidden`: a wrong value is not
    repeated, since it may be the secret that is to be elsewhere."""

    def __init__(self, noun: str, pattern: str = r"[^\0]+", *, is_hidden: bool = False) -> None:
        self._noun, self._pattern = noun, re.compile(pattern)
        self.is_hidden = is_hidden

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
    """Where a protocol listens. Port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`host:port`, an IPv6 host in brackets."""
        match = re.fullmatch(r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[^\s:\[\]]+)):(?P<port>[0-9]{1,5})", text.strip(), re.ASCII)
        if match is None or int(match["port"]) > 65_535:
            raise ValueError(f"{text!r} is not HOST:PORT")
        return cls(match["six"] or match["host"], int(match["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Bind:
    """An address to listen on and the protocols it takes: all of them, unless some are named."""

    address: Address
    protocols: tuple[str, ...] = ()
    """Empty: all."""

    def __str__(self) -> str:
        return f"{self.address}={','.join(self.protocols)}" if self.protocols else str(self.address)


class Binds:
    """A list of `HOST:PORT` or `HOST:PORT=protocol,protocol`; in the environment, with commas between."""

    def __init__(self, protocols: Sequence[str], *, kind: str = "TCP", least: int = 1) -> None:
        self._protocols, self._kind, self._least = tuple(protocols), kind, least

    @property
    def expected(self) -> str:
        return (
            'a list of "HOST:PORT" or "HOST:PORT=PROTOCOL,…" (port 0 takes a free one), '
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
    """A list of texts that somebody else understands; in the environment, with commas between."""

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
    """Split at the commas between addresses, not at those between the protocols of one: a protocol has no colon."""
    parts: list[str] = []
    for part in filter(None, map(str.strip, text.split(","))):
        if ":" in part or not parts:
            parts.append(part)
        else:
            parts[-1] += f",{part}"
    return parts


class References:
    """A list of secrets that are elsewhere: `file:PATH` or `env:VARIABLE`, each with the name of its owner before it or not."""

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
            # Not quoted: whoever wrote a secret here by mistake does not want to read it in a log.
            raise ValueError("not a reference")
        return SecretReference(match["kind"], match["place"], match["owner"] or "")


@dataclasses.dataclass(frozen=True, slots=True)
class SecretReference:
    """Where a secret is found, never the secret itself."""

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
        """Its twin in the environment."""
        return "HEADRACE__" + self.name.replace(".", "__").upper()


def setting(kind: Kind[object], default: object, text: str) -> Any:
    """A dataclass field that knows its kind and its text. The default is written as a file would hold it."""
    return dataclasses.field(default=kind.parse(default), metadata={"kind": kind, "text": text})


def settings_of(tree: type[Any]) -> dict[str, Setting]:
    """All keys of a tree of sections, in the order of declaration."""
    found: dict[str, Setting] = {}
    for section in dataclasses.fields(tree):
        assert section.default is not dataclasses.MISSING, "a section is present even when the file does not name it"
        for leaf in dataclasses.fields(section.default):
            name = f"{section.name}.{leaf.name}"
            found[name] = Setting(name, leaf.metadata["kind"], leaf.default, leaf.metadata["text"])
    return found
