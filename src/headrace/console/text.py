"""Text of users and messages as harmless HTML: escaped, with invisible and direction-changing characters made visible."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, TypeAlias

from markupsafe import Markup, escape

_KEPT: Final = frozenset("\n\t")
_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
"""Categories of control characters, marks of direction and width, surrogates, private and unassigned characters."""
PREVIEW_CHARACTERS: Final = 160
TEXT_BYTES_MAX: Final = 64 << 10
"""Bytes of a value that a page shows. The rest can be downloaded."""
_NODES_MAX: Final = 2_000
"""Elements of a JSON document that a page shows."""
_DEPTH_MAX: Final = 40
_OPEN_DEPTH: Final = 2
"""Objects of JSON below this depth are folded."""
_HEX_WIDTH: Final = 16
_PLAIN: Final = re.compile(r"[\x20-\x7e\n\t]*")


def visible(content: object, *, lines: bool = False) -> Markup:
    """Return text as HTML. Characters that would be invisible, or would reorder the text around them, become escape sequences."""
    text = str(content)
    if _PLAIN.fullmatch(text) and (lines or "\n" not in text):
        return escape(text)
    parts: list[str] = []
    for character in text:
        if unicodedata.category(character) in _HIDDEN and not (lines and character in _KEPT):
            parts.append(f'<span class="escaped">{escape(escape_sequence(character))}</span>')
        else:
            parts.append(escape(character))
    return Markup("".join(parts))


def escape_sequence(character: str) -> str:
    return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}.get(character) or character.encode("unicode_escape", "surrogatepass").decode("ascii")


def text_of(content: bytes) -> str:
    """Decode UTF-8; each invalid byte becomes \\xNN."""
    return content.decode("utf-8", "backslashreplace")


def preview(content: bytes | None, characters: int = PREVIEW_CHARACTERS) -> Markup:
    """Return the beginning of a key or value in one line."""
    if content is None:
        return Markup('<span class="muted">none</span>')
    text = text_of(content[: 4 * characters])
    is_cut = len(text) > characters or len(content) > 4 * characters
    return visible(text[:characters]) + ("…" if is_cut else "")


def cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[:characters]}…"


@dataclass(slots=True)
class Shown:
    """A value as HTML, and the format that was used."""

    format: str
    html: Markup
    is_cut: bool = False
    """Whether only the beginning is shown."""
    fault: str = ""
    """Why the wanted format did not apply."""


FORMATS: Final = ("auto", "json", "text", "hex", "avro", "protobuf")


Decode: TypeAlias = Callable[[bytes], Any]
"""Decodes Avro or Protobuf to plain objects. Raises `ValueError`."""


def show_value(value: bytes | None, wanted: str = "auto", decode: Decode | None = None, *, bytes_max: int = TEXT_BYTES_MAX) -> Shown:
    """Return the first `bytes_max` bytes of a value as HTML in the wanted format."""
    if value is None:
        return Shown("tombstone", Markup('<p class="muted">No value: a tombstone.</p>'))
    if wanted == "hex":
        return _hex(value, bytes_max)
    fault = ""
    if decode is not None and len(value) <= bytes_max and wanted in ("auto", "avro", "protobuf"):
        try:
            return _tree(decode(value), "decoded")
        except (ValueError, RecursionError) as failure:
            fault = str(failure)
    elif wanted in ("avro", "protobuf"):
        fault = f"the topic requires no {wanted} schema"
    if wanted in ("auto", "json") and len(value) <= bytes_max:
        try:
            return _tree(json.loads(value), "json", fault)
        except (ValueError, RecursionError) as failure:
            fault = fault or (f"not JSON: {failure}" if wanted == "json" else "")
    if wanted == "json" and len(value) > bytes_max:
        fault = f"larger than {bytes_max >> 10} KiB: shown as text"
    part = value[:bytes_max]
    if wanted == "auto" and not _is_text(part, is_cut=len(value) > len(part)):
        shown = _hex(value, bytes_max)
        shown.fault = fault
        return shown
    html = Markup('<pre class="value" tabindex="0" dir="ltr">{}</pre>').format(visible(text_of(part), lines=True))
    return Shown("text", html, len(value) > len(part), fault)


def _is_text(content: bytes, *, is_cut: bool) -> bool:
    try:
        text = content.decode()
    except UnicodeDecodeError as failure:
        # The cut may have divided a character.
        if not is_cut or failure.start < len(content) - 3:
            return False
        text = content[: failure.start].decode()
    return "\0" not in text


def _hex(value: bytes, bytes_max: int) -> Shown:
    part = value[: bytes_max // 8]
    lines = []
    for start in range(0, len(part), _HEX_WIDTH):
        row = part[start : start + _HEX_WIDTH]
        printable = "".join(chr(byte) if 32 <= byte < 127 else "·" for byte in row)
        lines.append(f"{start:08x}  {row.hex(' '):<{3 * _HEX_WIDTH - 1}}  {printable}")
    html = Markup('<pre class="value" tabindex="0" dir="ltr">{}</pre>').format("\n".join(lines))
    return Shown("hex", html, len(value) > len(part))


@dataclass(slots=True)
class _Tree:
    """Renders plain objects as nested, foldable lists."""

    left: int = _NODES_MAX
    parts: list[str] = field(default_factory=list)

    def add(self, node: Any, depth: int) -> None:
        self.left -= 1
        if isinstance(node, dict) and node and depth < _DEPTH_MAX:
            self._container("{", "}", [(str(name), item) for name, item in node.items()], depth)
        elif isinstance(node, (list, tuple)) and node and depth < _DEPTH_MAX:
            self._container("[", "]", [(None, item) for item in node], depth)
        else:
            self.parts.append(_scalar(node))

    def _container(self, begin: str, end: str, items: list[tuple[str | None, Any]], depth: int) -> None:
        is_open = " open" if depth < _OPEN_DEPTH else ""
        noun = "field" if begin == "{" else "item"
        count = f"{len(items):,} {noun}{'' if len(items) == 1 else 's'}"
        self.parts.append(f'<details class="node"{is_open}><summary>{begin}<span class="count">{count}</span></summary><ul>')
        for number, (name, item) in enumerate(items):
            if self.left <= 0:
                self.parts.append(f'<li class="muted">… {len(items) - number:,} more</li>')
                break
            self.parts.append("<li>")
            if name is not None:
                self.parts.append(f'<span class="name">{visible(json.dumps(name, ensure_ascii=False))}</span>: ')
            self.add(item, depth + 1)
            self.parts.append("</li>")
        self.parts.append(f"</ul><span>{end}</span></details>")


def _scalar(node: Any) -> str:
    if isinstance(node, bool) or node is None:
        return f'<span class="word">{json.dumps(node)}</span>'
    if isinstance(node, (int, float)):
        return f'<span class="number">{visible(cut(_digits(node), 400))}</span>'
    if isinstance(node, bytes):
        return f'<span class="text">{visible(cut(node.hex(), 4_000))}</span>'
    plain = node if isinstance(node, (str, dict, list)) else str(node)
    return f'<span class="text">{visible(cut(json.dumps(plain, ensure_ascii=False), 20_000))}</span>'


def _digits(node: float) -> str:
    try:
        return str(node)
    except ValueError:  # an integer with thousands of digits
        return f"{node:#x}"


def _tree(plain: Any, format: str, fault: str = "") -> Shown:
    tree = _Tree()
    tree.add(plain, 0)
    return Shown(format, Markup(f'<div class="value json" dir="ltr">{"".join(tree.parts)}</div>'), tree.left <= 0, fault)


# Numbers and times.


def moment(unix_ms: int | None) -> str:
    """Return a time in ISO 8601, UTC."""
    if not unix_ms:
        return "–"
    try:
        return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return str(unix_ms)


def size_text(size_bytes: float | None) -> str:
    if size_bytes is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" or size_bytes >= 100 else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def number(value: float | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.1f}" if 0 < value < 100 else f"{value:,.0f}"


def duration(ms: int | None) -> str:
    if ms is None:
        return "–"
    minutes, seconds = divmod(ms // 1000, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next((index for index, (number, _) in enumerate(parts) if number), 3)
    shown = [f"{number} {unit}" for number, unit in parts[first : first + 2] if number]
    return " ".join(shown) or "0 s"
