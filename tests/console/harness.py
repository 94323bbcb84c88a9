"""A real broker and a real console in this process, each on a thread of its own, and a small browser without JavaScript."""

from __future__ import annotations

import asyncio
import contextlib
import html
import http.client
import re
import socket
import threading
import time
from collections.abc import Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import uvicorn

from headrace.clients.connect import Address
from headrace.clients.flymq.client import FlyMqClient, FlyMqOptions
from headrace.console.application import create_console
from headrace.console.connection import BrokerAddress
from headrace.console.guard import hosts_of
from headrace.console.visits import Settings
from headrace.server.config import SETTINGS
from headrace.server.config_sources import resolve
from headrace.server.wiring import Server

WAIT_SECONDS = 300.0
ADMIN_PASSWORD = "a long admin password"
T = TypeVar("T")


class BrokerThread:
    """A broker with its listeners. `restart` keeps data and port."""

    def __init__(self, path: Path, *, is_enforced: bool) -> None:
        self.path, self.is_enforced = path, is_enforced
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker", daemon=True)
        self._thread.start()
        self.port = 0
        self.open()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_SECONDS)

    def open(self) -> None:
        flags: dict[str, tuple[str, object]] = {
            "storage.path": ("test", str(self.path)),
            "storage.headroom": ("test", "0"),
            "listen.tcp": ("test", [f"127.0.0.1:{self.port}"]),
            **{name: ("test", []) for name in ("listen.flight", "listen.quic", "listen.http") if name in SETTINGS},
        }
        if self.is_enforced:
            secret = self.path.parent / "password"
            secret.write_text(ADMIN_PASSWORD)
            secret.chmod(0o600)
            flags |= {"access.mode": ("test", "enforced"), "access.admin_password_file": ("test", str(secret))}
        config = resolve(file=None, environment={}, flags=flags).config
        self.server = Server(config, key=None, clock=lambda: time.time_ns() // 1_000_000)
        opened = self.do(self.server.open())
        self.port = int(opened[0].address.rpartition(":")[2])

    def stop(self) -> None:
        self.do(self.server.close())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    @property
    def address(self) -> Address:
        return Address("flymq", "127.0.0.1", self.port)

    def call(self, operation: str, user: str = "", password: str = "", **arguments: object) -> Any:
        """Call an operation of the broker as a client does."""

        async def work(client: FlyMqClient) -> Any:
            return await client.call(operation, **arguments)

        return self.with_client(work, user, password)

    def with_client(self, work: Any, user: str = "", password: str = "") -> Any:
        if self.is_enforced and not user:
            user, password = "admin", ADMIN_PASSWORD

        async def connected() -> Any:
            options = FlyMqOptions(user=user, password=password) if user else FlyMqOptions()
            client = await FlyMqClient.connect("127.0.0.1", self.port, options)
            try:
                return await work(client)
            finally:
                client.abandon()

        return asyncio.run(connected())

    def publish(self, topic: str, *records: dict[str, object], partition: int | None = None) -> None:
        """Publish records whose fields are base64 already, or text."""
        import base64

        def coded(content: object) -> object:
            raw = content.encode() if isinstance(content, str) else content
            return base64.b64encode(raw).decode() if isinstance(raw, bytes) else raw

        rows = [
            {
                "value": coded(record.get("value")),
                "key": coded(record.get("key")),
                "headers": [[name, coded(value)] for name, value in record.get("headers", [])],  # type: ignore[attr-defined]
            }
            for record in records
        ]
        self.call("record.publish", topic=topic, records=rows, partition=partition)


class ConsoleThread:
    """A console on a free port."""

    def __init__(
        self, broker: BrokerThread | Address, *, root_path: str = "", is_read_only: bool = False, audit_file: Path | None = None
    ) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.root_path = root_path
        address = broker if isinstance(broker, Address) else broker.address
        settings = Settings(BrokerAddress(address), root_path, is_read_only, False, f"headrace_console_{self.port}")
        application = create_console(settings, hosts=hosts_of("127.0.0.1", ["console.test"], is_loopback=True), audit_file=audit_file)
        self._server = uvicorn.Server(uvicorn.Config(application, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self._socket]), name="console", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + WAIT_SECONDS
        while not self._server.started:
            assert self._thread.is_alive() and time.monotonic() < deadline, "the console did not start"
            time.sleep(0.01)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.root_path}"

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(WAIT_SECONDS)
        self._socket.close()


@dataclass
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def words(self) -> str:
        """The text that a reader sees."""
        without = re.sub(r"<(script|style)[^>]*>.*?</\1>|<[^>]*>", "", self.text, flags=re.DOTALL)
        return " ".join(html.unescape(without).split())

    @property
    def token(self) -> str:
        found = re.search(r'name="token" value="([^"]+)"', self.text)
        assert found, "the page has no form"
        return found[1]

    @property
    def commands(self) -> list[str]:
        return [
            html.unescape(re.sub(r"<[^>]*>", "", text)) for text in re.findall(r'class="command"><code>(.*?)</code>', self.text, re.DOTALL)
        ]


@dataclass
class Browser:
    """Sends requests as a browser does, keeps cookies, and follows redirections."""

    port: int
    root_path: str = ""
    cookies: dict[str, str] = field(default_factory=dict)
    host: str = ""

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        try:
            sent = {"Host": self.host or f"127.0.0.1:{self.port}", "Sec-Fetch-Site": "same-origin"}
            sent |= {name.replace("_", "-"): value for name, value in headers.items()}
            if self.cookies:
                sent["Cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
            connection.request(method, path, body, {name: value for name, value in sent.items() if value})
            answer = connection.getresponse()
            for cookie in answer.headers.get_all("set-cookie") or []:
                name, _, value = cookie.partition(";")[0].partition("=")
                self.cookies[name] = value.strip('"')
            return Reply(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **query: object) -> Reply:
        reply = self.request("GET", self.root_path + path + (f"?{urlencode(query)}" if query else ""))
        return self._followed(reply)

    def post(self, path: str, fields: dict[str, object], *, page: str = "", **headers: str) -> Reply:
        """Send a form. The token is that of `page`, by default of the same path."""
        if "token" not in fields:
            fields = {"token": self.request("GET", self.root_path + (page or path)).token, **fields}
        body = urlencode(fields, doseq=True).encode()
        reply = self.request("POST", self.root_path + path, body, Content_Type="application/x-www-form-urlencoded", **headers)
        return self._followed(reply)

    def _followed(self, reply: Reply) -> Reply:
        for _ in range(5):
            if reply.status != 303:
                return reply
            place = urlsplit(reply.headers["location"])
            assert not place.netloc, "a redirection stays on this site"
            reply = self.request("GET", place.path + (f"?{place.query}" if place.query else ""))
        raise AssertionError("too many redirections")

    def events(self, path: str, **query: object) -> Generator[tuple[str, str], None, None]:
        """Yield (name, data) of server-sent events until the server ends them."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        try:
            cookie = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
            connection.request("GET", f"{self.root_path}{path}?{urlencode(query)}", headers={"Cookie": cookie})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            name, data = "", []
            while line := answer.readline().decode():
                line = line.rstrip("\n")
                if line.startswith("event: "):
                    name = line.removeprefix("event: ")
                elif line.startswith("data: "):
                    data.append(line.removeprefix("data: "))
                elif not line and name:
                    yield name, "\n".join(data)
                    name, data = "", []
        finally:
            connection.close()

    def log_in(self, user: str, password: str) -> Reply:
        return self.post("/login", {"token": "", "user": user, "password": password, "to": "/"})


@contextlib.contextmanager
def running(path: Path, *, is_enforced: bool = False, **options: Any) -> Iterator[tuple[BrokerThread, ConsoleThread]]:
    broker = BrokerThread(path / "broker", is_enforced=is_enforced)
    try:
        console = ConsoleThread(broker, **options)
        try:
            yield broker, console
        finally:
            console.close()
    finally:
        broker.close()
