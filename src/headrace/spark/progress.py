"""How far a stream has come, told to the broker: a group whose lag everybody can see (`headrace group lag`).

It is for people. The checkpoint decides where a query goes on, so a commit that fails is a warning, and a query never waits for one
unless it is about to end.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Final

from headrace.errors import BrokerError, NotAuthorized
from headrace.flight.client import FlightClient
from headrace.spark.offsets import Offsets, nested

RETRY_SECONDS: Final = 1.0

_log = logging.getLogger("headrace.spark")


class Progress:
    """Commits the latest offsets it was told, by a thread of its own; what came in between is passed over."""

    def __init__(self, client: FlightClient, group: str) -> None:
        self._client, self._group = client, group
        self._told: Offsets = {}
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._allowed = True

    def tell(self, offsets: Offsets, *, wait: bool) -> None:
        """With `wait` it is durable on return. Telling the same again costs nothing."""
        with self._news:
            if offsets == self._told or not self._allowed:
                return
            self._told = dict(offsets)
            self._news.notify()
            if wait:
                self._told = self._told if self._commit(self._told) else {}
            elif self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="headrace-progress", daemon=True)
                self._thread.start()

    def _follow(self) -> None:
        done: Offsets = {}
        while self._allowed:
            with self._news:
                while self._told == done:
                    self._news.wait()
                latest = self._told
            if self._commit(latest):
                done = latest
            else:
                time.sleep(RETRY_SECONDS)

    def _commit(self, offsets: Offsets) -> bool:
        try:
            self._client.commit(self._group, nested(offsets))
            return True
        except NotAuthorized as failure:
            self._allowed = False
            _log.warning("the progress of this query will not be shown: %s", failure)
        except BrokerError as failure:
            _log.warning("the progress of this query is not shown in group %s for now: %s", self._group, failure)
        return False
