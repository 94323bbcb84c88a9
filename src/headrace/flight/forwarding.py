"""Calls that need the coordinator, passed on to its Flight endpoint with the credentials of the caller.

A token is valid in one process only, so a caller that has logged in with a password is logged in at the coordinator once for each token.
A forwarded call has a header, and the broker that receives it never forwards it again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Final, TypeVar

import pyarrow as pa
from pyarrow import flight

from headrace.errors import LoginFailed, Unavailable
from headrace.flight.errors import broker_error
from headrace.flight.sockets import shut
from headrace.limits import FLIGHT_TOKENS_MAX, RELAY_CONNECT_SECONDS_MAX, RELAY_RETRY_SECONDS, RELAY_WAIT_SECONDS_MAX

T = TypeVar("T")
FORWARDED: Final = "x-headrace-forwarded"
"""Header of a forwarded call."""
ABANDONED: Final = b"abandoned"
"""Metadata that ends the rows of a put whose caller has left: the end of a stream alone would look like the end of its rows."""
_OPTIONS: Final = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
_FAILURES: Final = (flight.FlightError, pa.ArrowException, OSError)


class Forwarding:
    """Connections to the Flight endpoint of the coordinator. Thread-safe.

    `location` returns its URL, `grpc+tcp://HOST:PORT` or `grpc+tls://HOST:PORT`, empty if it is unknown. `ca` verifies it, in PEM.
    """

    def __init__(self, location: Callable[[], str], ca: bytes = b"", *, wait_seconds: float = RELAY_WAIT_SECONDS_MAX) -> None:
        self._location, self._ca, self._wait_seconds = location, ca, wait_seconds
        self._lock = threading.Lock()
        self._client: tuple[str, flight.FlightClient] | None = None
        self._tokens: dict[str, tuple[bytes, bytes]] = {}
        """Tokens of the coordinator, by those of this broker."""

    def close(self) -> None:
        with self._lock:
            self._drop()

    def coordinator_changed(self) -> None:
        """End the connection to a former coordinator. One that is paused or whose machine is lost would never answer its calls, and pyarrow
        cannot cancel them. Resolves a name, so it must not run on the event loop."""
        with self._lock:
            former = "" if self._client is None else self._client[0]
            if not former or former == self._location():
                return
            self._drop()
        host, _, port = former.partition("://")[2].rpartition(":")
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError:
            return  # the name is gone; the calls end with their connection
        shut(None, {(str(place[0]), int(place[1])) for *_, place in found})

    def ready(
        self, bearer: str, login: tuple[str, str] | None, is_coordinator: Callable[[], bool], *, may_connect: bool
    ) -> Connected | None:
        """Return a connection on which the coordinator accepts calls of this caller. None: this broker is the coordinator now, or none
        can be reached. Raises the error of a login that the coordinator refuses."""
        deadline = time.monotonic() + self._wait_seconds
        while not is_coordinator() and time.monotonic() < deadline:
            location = self._location() if may_connect else ""
            try:
                if location:
                    return self._connected(location, bearer, login)
            except _FAILURES as failure:
                self.drop(bearer)
                error = broker_error(failure) if isinstance(failure, flight.FlightError) else None
                if error is not None and not isinstance(error, Unavailable):
                    raise error from None
            time.sleep(RELAY_RETRY_SECONDS)
        return None

    def drop(self, bearer: str) -> None:
        """Connect and log in again before the next call."""
        with self._lock:
            self._tokens.pop(bearer, None)
            self._drop()

    def _connected(self, location: str, bearer: str, login: tuple[str, str] | None) -> Connected:
        with self._lock:
            if self._client is not None and self._client[0] == location and (login is None or bearer in self._tokens):
                return Connected(self._client[1], self._headers(bearer, login), partial(self.drop, bearer))
            if self._client is None or self._client[0] != location:
                self._drop()
                options = dict[str, Any](generic_options=_OPTIONS)
                if self._ca:
                    options["tls_root_certs"] = self._ca
                self._client = location, flight.FlightClient(location, **options)
            client = self._client[1]
            if login is not None and bearer not in self._tokens:
                options = flight.FlightCallOptions(timeout=RELAY_CONNECT_SECONDS_MAX)
                self._tokens[bearer] = client.authenticate_basic_token(*login, options)
                while len(self._tokens) > FLIGHT_TOKENS_MAX:
                    del self._tokens[next(iter(self._tokens))]
            found = Connected(client, self._headers(bearer, login), partial(self.drop, bearer))
        list(client.list_actions(found.options(RELAY_CONNECT_SECONDS_MAX)))  # verifies the password
        return found

    def _headers(self, bearer: str, login: tuple[str, str] | None) -> list[tuple[bytes, bytes]]:
        marked = [(FORWARDED.encode(), b"1")]
        if login is not None:
            return [*marked, self._tokens[bearer]]
        return [*marked, (b"authorization", b"Bearer " + bearer.encode())] if bearer else marked

    def _drop(self) -> None:
        self._client = None  # calls of other threads may use it still
        self._tokens.clear()


class Connected:
    """A connection to the coordinator, and the credentials of one caller. `failed` is called if either cannot be used any more."""

    def __init__(self, client: flight.FlightClient, headers: list[tuple[bytes, bytes]], failed: Callable[[], None]) -> None:
        self._client, self._headers, self._failed = client, headers, failed

    def options(self, seconds: float | None = None) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(timeout=seconds, headers=self._headers)

    def act(self, action: flight.Action) -> list[bytes]:
        """Execute an action. Raises the error of the coordinator."""
        return self._raising(lambda: [result.body.to_pybytes() for result in self._client.do_action(action, self.options())])

    def put(self, descriptor: flight.FlightDescriptor, schema: pa.Schema, rows: Iterable[pa.RecordBatch]) -> bytes:
        """Send the rows as they come, and return the answer. Raises the error of the coordinator, and that of `rows`."""
        writer, answers = self._raising(lambda: self._client.do_put(descriptor, schema, self.options()))
        try:
            for batch in rows:
                self._raising(partial(writer.write_batch, batch))
        except BaseException:
            try:
                writer.write_metadata(ABANDONED)
                writer.close()
            except _FAILURES:
                pass
            raise

        def finish() -> bytes:
            writer.done_writing()
            answer = answers.read()
            writer.close()
            return b"" if answer is None else answer.to_pybytes()

        return self._raising(finish)

    def _raising(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except _FAILURES as failure:
            error = broker_error(failure) if isinstance(failure, flight.FlightError) else None
            if error is None or isinstance(error, LoginFailed):
                self._failed()
            raise error or Unavailable(f"the coordinator does not answer: {str(failure)[:200]}") from None
