"""Identity file of a data directory: four lines of text, read before any other file.

headrace data directory
format 2
key none | <fingerprint, hex>
crc <CRC-32C of the lines above, hex>
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from google_crc32c import value as crc32c

from headrace.errors import CorruptData
from headrace.storage.files import Files

PATH: Final = "IDENTITY"
_TEMPORARY: Final = "IDENTITY.tmp"
FORMAT: Final = 2
_FORMATS_READ: Final = (1, 2)
"""A directory of format 1 has no references in its journal. It becomes one of format 2 when it is opened."""
_TITLE: Final = "headrace data directory"


@dataclass(frozen=True, slots=True)
class Identity:
    key: str | None
    """Fingerprint of the encryption key; None without encryption."""
    format: int = FORMAT

    def encode(self) -> bytes:
        text = f"{_TITLE}\nformat {self.format}\nkey {self.key or 'none'}\n".encode()
        return text + f"crc {crc32c(text):08x}\n".encode()

    @classmethod
    def decode(cls, content: bytes) -> Identity | None:
        """Decode the file; None if it is damaged. Raises `CorruptData` for the format of another release."""
        text, mark, crc = content.rpartition(b"crc ")
        if not mark or crc != f"{crc32c(text):08x}\n".encode():
            return None
        lines = text.decode("ascii").splitlines()
        if len(lines) != 3 or lines[0] != _TITLE:
            return None
        number = next((known for known in _FORMATS_READ if lines[1] == f"format {known}"), None)
        if number is None:
            raise CorruptData(f"data directory format: expected format {FORMAT} or lower, got {lines[1]}; use the release that wrote it")
        key = lines[2].removeprefix("key ")
        return cls(None if key == "none" else key, number)


def read_identity(files: Files) -> tuple[Identity | None, bool]:
    """Return (the identity or None, whether the file exists and is unreadable)."""
    try:
        file = files.open_readonly(PATH)
    except FileNotFoundError:
        return None, False
    try:
        identity = Identity.decode(file.read_at(0, file.size()))
    finally:
        file.close()
    return identity, identity is None


def write_identity(files: Files, identity: Identity) -> None:
    files.remove(_TEMPORARY)
    file = files.open(_TEMPORARY, create=True)
    try:
        file.write_at(0, [identity.encode()])
        file.sync()
    finally:
        file.close()
    files.rename(_TEMPORARY, PATH)
    files.sync_dir("")
