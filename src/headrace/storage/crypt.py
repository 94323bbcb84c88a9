"""Encryption at rest: AES-256-GCM, one derived key for each log, a nonce that is never used twice.

    nonce = epoch u32 | counter u64      (little-endian, 12 bytes)

The epoch is the number of the journal file that was current when the store was opened. Each open makes a new journal file and
syncs it before the first batch is sealed, so no two lives of a store share an epoch; within one life the counter counts.
The header of a batch (all but its checksum) is the associated data: a batch cannot be moved to another log or offset.
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
    """The data directory was written with another key, or with one and none is given."""


class Keyring:
    """Derives the ciphers of all logs from the one key of the data directory."""

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise WrongKey(f"an encryption key has {KEY_BYTES} bytes, this one has {len(key)}")
        self._key = key
        self._ciphers: dict[int, AESGCM] = {}
        self._epoch = 0
        self._counter = itertools.count()

    def fingerprint(self) -> str:
        """What the data directory remembers of the key: enough to refuse another one, too little to find this one."""
        return hmac.new(self._key, b"headrace key fingerprint", hashlib.sha256).hexdigest()

    def start_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def next_nonce(self) -> bytes:
        assert self._epoch > 0, "sealing before the journal made its epoch durable"
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
            raise WrongKey(f"a batch of log {log} does not open with this key") from None
