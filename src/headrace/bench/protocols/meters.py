"""Meters of the protocols. They decode as little of a stream as possible.

`Acks` and `Stream` are for frames of one size: they decode the last frame of each read and count the others by their bytes. `Replies`
parses length-prefixed replies and keeps only the end of each; `Pages` requests the next page when one is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from headrace.bench.children import BenchFailed

PAGE_RECORDS_MAX: Final = 5_000
"""Maximum records of a page."""
PAGE_BYTES_MAX: Final = 1024 * 1024
PAGES_IN_FLIGHT: Final = 2
_END_BYTES: Final = 512
"""Kept end of a reply: enough for a trailing offset or an error text."""


class _EqualFrames:
    """Finds the last frame whose first `head_bytes` were received, in a stream of frames of one size."""

    def __init__(self, frame_bytes: int, head_bytes: int, skipped_bytes: int) -> None:
        self._frame_bytes, self._head_bytes, self._skipped_bytes = frame_bytes, head_bytes, skipped_bytes
        self._seen_bytes = 0
        self._tail = b""
        """Last `head_bytes` of the previous read."""

    def _last_head(self, received: bytearray, size: int) -> tuple[int, bytes] | None:
        """Return the frame's index and head; None if this read completed no head."""
        before, self._seen_bytes = self._seen_bytes, self._seen_bytes + size
        number, _ = divmod(self._seen_bytes - self._skipped_bytes - self._head_bytes, self._frame_bytes)
        begin = self._skipped_bytes + number * self._frame_bytes - before
        head = None
        if number >= 0 and begin + self._head_bytes > 0:
            whole = (
                bytes(received[begin : begin + self._head_bytes])
                if begin >= 0
                else self._tail[begin:] + received[: begin + self._head_bytes]
            )
            head = (number, whole)
        self._tail = (self._tail + received[max(0, size - self._head_bytes) : size])[-self._head_bytes :]
        return head


class Acks(_EqualFrames):
    """Counts acknowledgements of one size. `counted` returns the records covered by the last whole one, given its bytes and index."""

    def __init__(self, frame_bytes: int, counted: Callable[[bytes, int], int]) -> None:
        super().__init__(frame_bytes, frame_bytes, 0)
        self.count = 0
        self._counted = counted

    def feed(self, received: bytearray, size: int) -> bytes:
        last = self._last_head(received, size)
        if last is not None:
            number, frame = last
            self.count = self._counted(frame, number)
        return b""


class Stream(_EqualFrames):
    """Counts records of one size by their bytes. `check` validates the head and index of the last one."""

    def __init__(
        self, records: int, frame_bytes: int, head_bytes: int, check: Callable[[bytes, int], None], *, skipped_bytes: int = 0
    ) -> None:
        super().__init__(frame_bytes, head_bytes, skipped_bytes)
        self._records, self._check = records, check

    @property
    def count(self) -> int:
        return max(0, self._seen_bytes - self._skipped_bytes) // self._frame_bytes

    def feed(self, received: bytearray, size: int) -> bytes:
        last = self._last_head(received, size)
        extra = self._seen_bytes - self._skipped_bytes - self._records * self._frame_bytes
        if extra > 0:
            raise BenchFailed(f"received {extra} bytes more than {self._records} records")
        if last is not None:
            number, head = last
            self._check(head, number)
        return b""


class Replies:
    """Parses replies. A subclass implements `_on_reply`, which receives head and end of a reply and may return a request."""

    def __init__(self, head_bytes: int, rest_bytes: Callable[[bytes], int], *, end_bytes: int = _END_BYTES) -> None:
        self.count = 0
        self._head_bytes, self._rest_bytes, self._end_bytes = head_bytes, rest_bytes, end_bytes
        self._head = self._end = b""
        self._left = 0

    def feed(self, received: bytearray, size: int) -> bytes:
        requests, at = b"", 0
        while at < size:
            if len(self._head) < self._head_bytes:
                begun, at = at, min(size, at + self._head_bytes - len(self._head))
                self._head += received[begun:at]
                if len(self._head) == self._head_bytes:
                    self._left = self._rest_bytes(self._head)
            begun, at = at, min(size, at + self._left)
            self._left -= at - begun
            if self._left < self._end_bytes:
                self._end = (self._end + received[max(begun, at - self._end_bytes) : at])[-self._end_bytes :]
            if self._left == 0 and len(self._head) == self._head_bytes:
                head, end, self._head, self._end = self._head, self._end, b"", b""
                requests += self._on_reply(head, end)
        return requests

    def _on_reply(self, head: bytes, end: bytes) -> bytes:
        raise NotImplementedError


class Pages(Replies):
    """Reads a topic page by page, two in flight. The rest of a short page is requested again."""

    def __init__(
        self,
        records: int,
        page_records: int,
        request: Callable[[int, int], bytes],
        next_offset: Callable[[bytes, bytes], int],
        *,
        head_bytes: int,
        rest_bytes: Callable[[bytes], int],
    ) -> None:
        super().__init__(head_bytes, rest_bytes)
        self._records, self._page_records = records, page_records
        self._request, self._next_offset = request, next_offset
        self._requested: deque[tuple[int, int]] = deque()
        self._requested_to = 0

    def first_requests(self) -> bytes:
        return b"".join(self._next_page() for _ in range(PAGES_IN_FLIGHT))

    def _on_reply(self, head: bytes, end: bytes) -> bytes:
        begin, wanted = self._requested.popleft()
        following = self._next_offset(head, end)
        got = following - begin
        if not 0 < got <= wanted:
            raise BenchFailed(f"page from offset {begin}: expected at most {wanted} records, got next offset {following}")
        self.count += got
        return self._request_page(following, wanted - got) if got < wanted else self._next_page()

    def _next_page(self) -> bytes:
        begin = self._requested_to
        self._requested_to = min(begin + self._page_records, self._records)
        return self._request_page(begin, self._requested_to - begin) if self._requested_to > begin else b""

    def _request_page(self, begin: int, count: int) -> bytes:
        self._requested.append((begin, count))
        return self._request(begin, count)


def page_records(record_bytes: int) -> int:
    """Return the records of a page, given the bytes of a record on the wire."""
    return max(1, min(PAGE_RECORDS_MAX, PAGE_BYTES_MAX // record_bytes))
