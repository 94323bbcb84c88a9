"""What the protocols' meters have in common: they look at no more of a stream than they must.

`Acks` and `Stream` are for frames of one size. Of each read they look at one frame, the last one, and count the rest by their bytes.
`Replies` walks over replies that say how long they are, and keeps only the end of each; `Pages` asks for the next one when one has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from headrace.bench.faults import BenchFailed

PAGE_RECORDS_MAX: Final = 5_000
"""Records a page asks for."""
PAGE_BYTES_MAX: Final = 1024 * 1024
PAGES_UNDER_WAY: Final = 2
_END_BYTES: Final = 512
"""Of a reply: enough for an offset at its end, or for the words of an error."""


class _EqualFrames:
    """Finds the last frame whose first `head_bytes` have come, in a stream of frames of one size."""

    def __init__(self, frame_bytes: int, head_bytes: int, skipped_bytes: int) -> None:
        self._frame_bytes, self._head_bytes, self._skipped_bytes = frame_bytes, head_bytes, skipped_bytes
        self._seen_bytes = 0
        self._tail = b""
        """The end of the last read, as long as a head."""

    def _last_head(self, received: bytearray, size: int) -> tuple[int, bytes] | None:
        """The frame's number (from 0) and its head; None if this read has completed no head."""
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
    """Counts acknowledgements of one size: `counted` takes the last whole one and its number, and says how many records are covered."""

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
    """Counts records of one size by their bytes. `check` takes the head of the last one and its number, and raises if it is another's."""

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
            raise BenchFailed(f"{extra} bytes more than {self._records} records")
        if last is not None:
            number, head = last
            self._check(head, number)
        return b""


class Replies:
    """Walks over replies. A subclass says what one means: `_came` gets its head and its end, and may answer with a request."""

    def __init__(self, head_bytes: int, rest_bytes: Callable[[bytes], int], *, end_bytes: int = _END_BYTES) -> None:
        self.count = 0
        self._head_bytes, self._rest_bytes, self._end_bytes = head_bytes, rest_bytes, end_bytes
        self._head = self._end = b""
        self._left = 0

    def feed(self, received: bytearray, size: int) -> bytes:
        answers, at = b"", 0
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
                answers += self._came(head, end)
        return answers

    def _came(self, head: bytes, end: bytes) -> bytes:
        raise NotImplementedError


class Pages(Replies):
    """Reads a topic from its start, page by page, two of them under way. A page that comes short is asked for again from where it ended."""

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
        self._asked: deque[tuple[int, int]] = deque()
        self._asked_to = 0

    def first_requests(self) -> bytes:
        return b"".join(self._next_page() for _ in range(PAGES_UNDER_WAY))

    def _came(self, head: bytes, end: bytes) -> bytes:
        begin, wanted = self._asked.popleft()
        following = self._next_offset(head, end)
        got = following - begin
        if not 0 < got <= wanted:
            raise BenchFailed(f"a page of {wanted} records from offset {begin} ended at {following}")
        self.count += got
        return self._ask(following, wanted - got) if got < wanted else self._next_page()

    def _next_page(self) -> bytes:
        begin = self._asked_to
        self._asked_to = min(begin + self._page_records, self._records)
        return self._ask(begin, self._asked_to - begin) if self._asked_to > begin else b""

    def _ask(self, begin: int, count: int) -> bytes:
        self._asked.append((begin, count))
        return self._request(begin, count)


def page_records(record_bytes: int) -> int:
    """Records of a page, of that many bytes each on the wire."""
    return max(1, min(PAGE_RECORDS_MAX, PAGE_BYTES_MAX // record_bytes))
