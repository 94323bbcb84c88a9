"""Reading of the configuration: a TOML file, environment variables and flags become one `Config`.

Flags override the environment, the environment overrides the file, the file overrides the defaults. Each key has an environment
variable: `storage.ack` is `HEADRACE__STORAGE__ACK`.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace.errors import ConfigError
from headrace.limits import MIB
from headrace.server.config import SECTIONS, SETTINGS, Config, contradictions, tree_of
from headrace.server.settings import Plain, Reference, References, Setting, anchored, from_text

_FILE_BYTES_MAX: Final = 1 * MIB
_VARIABLE_PREFIX: Final = "HEADRACE__"


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration and the origin of each value: `default`, a file, a variable or a flag."""

    config: Config
    origins: Mapping[str, str]

    def value(self, name: str) -> Any:
        section, _, leaf = name.partition(".")
        return getattr(getattr(self.config, section), leaf)

    def plain(self, name: str) -> Plain:
        """Return the value as written in a file."""
        return SETTINGS[name].kind.plain(self.value(name))


def resolve(
    *, file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, tuple[str, object]] | None = None
) -> Resolved:
    """Merge defaults, file, environment and flags, in ascending priority. `flags` maps a key to (flag name, value).

    Raises `ConfigError` with one line for the first error found.
    """
    values: dict[str, object] = {name: known.default for name, known in SETTINGS.items()}
    origins = dict.fromkeys(SETTINGS, "default")

    def take(name: str, raw: object, origin: str, *, is_text: bool = False) -> None:
        values[name] = _parse(SETTINGS[name], raw, origin, is_text)
        origins[name] = origin

    if file is not None:
        for name, raw, fault in leaves(read_file(file)[1]):
            if fault:
                raise ConfigError(f"{file}: {fault}")
            take(name, raw, f"file {file}")
            values[name] = anchored(SETTINGS[name].kind, values[name], file.parent)
    for name, variable, text in _from_environment(environment or {}):
        take(name, text, f"environment {variable}", is_text=True)
    for name, (flag, raw) in (flags or {}).items():
        take(name, raw, f"flag {flag}", is_text=isinstance(raw, str))
    config = tree_of(values)
    _check_together(config)
    return Resolved(config, origins)


def explain(name: str) -> Setting:
    """Return the setting of that name. Raises `ConfigError` with the nearest valid name."""
    if name not in SETTINGS:
        raise ConfigError(f"unknown key {name}{nearest(name, SETTINGS)}")
    return SETTINGS[name]


def toml_of(resolved: Resolved) -> str:
    """Return the configuration as a TOML file."""
    lines: list[str] = []
    for section in SECTIONS:
        lines.append(f"[{section}]")
        lines += [f"{name.partition('.')[2]} = {toml_value(resolved.plain(name))}" for name in SETTINGS if name.startswith(section + ".")]
        lines.append("")
    return "\n".join(lines)


def toml_value(value: Plain) -> str:
    """Return one value in TOML syntax."""
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(value)
        case str():
            return _toml_string(value)
        case list():
            return "[" + ", ".join(map(_toml_string, value)) + "]"


def _toml_string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else f"\\U{ord(char):08X}" for char in escaped) + '"'


def read_file(file: Path) -> tuple[str, dict[str, object]]:
    """Return the text and the document of a TOML file. Raises `ConfigError`."""
    try:
        with file.open("rb") as stream:
            content = stream.read(_FILE_BYTES_MAX + 1)
    except OSError as failure:
        raise ConfigError(f"{file}: {failure.strerror or failure}") from None
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{file}: larger than {_FILE_BYTES_MAX} bytes")
    try:
        text = content.decode("utf-8")
        return text, tomllib.loads(text)
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{file}: not UTF-8 (byte {failure.start})") from None
    except tomllib.TOMLDecodeError as failure:
        raise ConfigError(f"{file}: {failure}") from None


def leaves(document: Mapping[str, object]) -> Iterable[tuple[str, object, str]]:
    """Yield (key, raw value, fault) for every key of a file. The fault is empty if the key exists."""
    for section, content in document.items():
        if section not in SECTIONS:
            hint = nearest(section, SECTIONS) if isinstance(content, dict) else nearest(section, SETTINGS)
            yield section, content, f"unknown {'section' if isinstance(content, dict) else 'key'} {quoted(section)}{hint}"
        elif not isinstance(content, dict):
            yield section, content, f"{section} = {quoted(content)}: expected a section [{section}]"
        else:
            for leaf, raw in content.items():
                name = f"{section}.{leaf}"
                yield name, raw, "" if name in SETTINGS else f"unknown key {quoted(name)}{nearest(name, SETTINGS)}"


def _from_environment(environment: Mapping[str, str]) -> Iterable[tuple[str, str, str]]:
    names = {known.variable: name for name, known in SETTINGS.items()}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(_VARIABLE_PREFIX):
            continue
        if variable not in names:
            raise ConfigError(f"unknown environment variable {quoted(variable)}{nearest(variable, names)}")
        yield names[variable], variable, text


def _parse(known: Setting, raw: object, origin: str, is_text: bool) -> object:
    try:
        return known.kind.parse(from_text(known.kind, str(raw)) if is_text else raw)
    except ValueError as failure:
        # A wrong value of a secret reference may be the secret itself.
        is_hidden = isinstance(known.kind, References) or (isinstance(known.kind, Reference) and known.kind.is_hidden)
        shown = "" if is_hidden else f" = {quoted(raw)}"
        raise ConfigError(f"{known.name}{shown} ({origin}): {failure}; expected {known.kind.expected}") from None


def _check_together(config: Config) -> None:
    """Check rules that concern more than one key. Raises `ConfigError`."""
    for _, fault in contradictions(config):
        raise ConfigError(fault)


def nearest(name: str, valid: Iterable[str]) -> str:
    """Return the end of an error message: the valid name that is most similar, or some of the valid names."""
    candidates = list(valid)
    found = difflib.get_close_matches(name, candidates, n=1, cutoff=0.4)
    if not found:  # the right key in the wrong section, or without a section
        leaf = name.rpartition(".")[2]
        found = [candidate for candidate in candidates if candidate.rpartition(".")[2] == leaf][:1]
    return f"; did you mean {found[0]}?" if found else f"; valid are {', '.join(candidates[:8])}{', …' if len(candidates) > 8 else ''}"


def quoted(value: object) -> str:
    """Return the value on one line of at most 60 characters."""
    text = toml_value(value) if isinstance(value, (str, bool, int)) else repr(value)
    text = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return text if len(text) <= 60 else text[:57] + "..."
