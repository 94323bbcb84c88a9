"""Progress of a stream, committed to a group of the broker for monitoring (`headrace group lag`).

The checkpoint decides where a query resumes. So a failed commit is only a warning, and a query waits for a commit only before it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from headrace.errors import BrokerError, NotAuthorized
from headrace.flight.client import FlightClient
from headrace.retry import exponential
from headrace.spark.offsets import Offsets, nested

_BACKOFF: Final = exponential()

_log = logging.getLogger("headrace.spark")


class Progress:
    """Background commits of the latest reported offsets. Offsets that newer ones replace are not committed."""

    def __init__(self, client: FlightClient, group: str) -> None:
        self._client, self._group = client, group
        self._latest: Offsets = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._allowed = True

    def report(self, offsets: Offsets, *, wait: bool) -> None:
        """Commit these offsets in the background, or with `wait` before returning. Unchanged offsets are not committed again."""
        with self._changed:
            if offsets == self._latest or not self._allowed:
                return
            self._latest = dict(offsets)
            self._changed.notify()
            if wait:
                self._latest = self._latest if self._commit(self._latest) else {}
            elif self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="headrace-progress", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        done: Offsets = {}
        failures = 0
        while self._allowed:
            with self._changed:
                while self._latest == done:
                    self._changed.wait()
                latest = self._latest
            if self._commit(latest):
                done, failures = latest, 0
            else:
                failures += 1
                time.sleep(_BACKOFF(failures))

    def _commit(self, offsets: Offsets) -> bool:
        try:
            self._client.commit(self._group, nested(offsets))
            return True
        except NotAuthorized as failure:
            self._allowed = False
            _log.warning("the progress of this query is not committed to group %s: %s", self._group, failure)
        except BrokerError as failure:
            _log.warning("cannot commit the progress of this query to group %s, will retry: %s", self._group, failure)
        return False
