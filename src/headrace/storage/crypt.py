"""Encryption at rest: AES-256-GCM with one derived key per log and unique nonces.

    nonce = epoch u32 | counter u64      (little-endian, 12 bytes)

The epoch is the number of the journal file that was current when the store was opened. Each open creates a new journal file and
syncs its name before the first batch is encrypted, so no two opens share an epoch. Within one open the counter makes nonces unique.
The header of a batch, except its checksum, is the associated data: a batch cannot be moved to another log or offset.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import struct
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from headrace.errors import HeadraceError

KEY_BYTES: Final = 32
NONCE_BYTES: Final = 12
TAG_BYTES: Final = 16
_NONCE = struct.Struct("<IQ")
assert _NONCE.size == NONCE_BYTES, "the drawing says 12"


class WrongKey(HeadraceError):
    """The configured key does not match the data directory, or is missing or superfluous."""


class Keyring:
    """Ciphers of all logs, derived from the key of the data directory."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise WrongKey(f"encryption key: expected {KEY_BYTES} bytes, got {len(key)}")
        self._key = key
        self._ciphers: dict[int, AESGCM] = {}
        self._epoch = 0
        self._counter = itertools.count()

    def fingerprint(self) -> str:
        """Return the fingerprint that the data directory stores: it identifies the key and does not reveal it."""
        return hmac.new(self._key, b"headrace key fingerprint", hashlib.sha256).hexdigest()

    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def next_nonce(self) -> bytes:
        assert self._epoch > 0, "encryption before the journal made its epoch durable"
        return _NONCE.pack(self._epoch, next(self._counter))

    def _cipher(self, log: int) -> AESGCM:
        cipher = self._ciphers.get(log)
        if cipher is None:
            info = b"headrace log %d" % log
            cipher = self._ciphers[log] = AESGCM(HKDF(SHA256(), KEY_BYTES, salt=None, info=info).derive(self._key))
        return cipher

    def seal(self, log: int, nonce: bytes, plain: bytes, associated: bytes) -> bytes:
        return self._cipher(log).encrypt(nonce, plain, associated)

    def unseal(self, log: int, nonce: bytes, sealed: bytes, associated: bytes) -> bytes:
        try:
            return self._cipher(log).decrypt(nonce, sealed, associated)
        except InvalidTag:
            raise WrongKey(f"cannot decrypt a batch of log {log}: the key is wrong or the batch was changed") from None
