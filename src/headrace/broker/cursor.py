"""Push: records are delivered as they come, as fast as the receiver gives credit."""

from __future__ import annotations


class Cursor:
    """A place in a partition that moves on by itself."""

    @property
    def position(self) -> int:
        """The next offset to be delivered."""
        raise NotImplementedError

    def grant(self, credit_bytes: int) -> None:
        """The receiver has room for so many bytes more."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is delivered after this. Idempotent."""
        raise NotImplementedError
