"""Ids of requests in log lines, for protocols whose requests have them.

Lines of refused requests are of level debug: a peer can cause as many as it sends requests.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

_log = logging.getLogger(__name__)
_IDS_SHOWN_MAX: Final = 8


def shown(requests: Sequence[int | bytes]) -> str:
    """Return the first of these ids. An id in bytes is a big-endian number."""
    ids = [request if isinstance(request, int) else int.from_bytes(request, "big") for request in requests[:_IDS_SHOWN_MAX]]
    return ",".join(map(str, ids)) + ",…" * (len(requests) > _IDS_SHOWN_MAX)


def log_refused(protocol: str, peer: str, reason: str, requests: Sequence[int | bytes]) -> None:
    """Log that the requests with these ids were refused."""
    if _log.isEnabledFor(logging.DEBUG):
        _log.debug("request refused", extra={"peer": peer, "protocol": protocol, "request": shown(requests), "reason": reason})
