"""One request of a browser: who asks, the connection that acts for them, and the ways to answer."""

from __future__ import annotations

import asyncio
import hmac
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from itertools import takewhile
from typing import Any, Final, TypeVar
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from headrace import __version__
from headrace.clients.errors import ConnectFailed, RefusedRepeatedly
from headrace.clients.flymq.client import FlyMqClient
from headrace.console import text
from headrace.console.audit import Entry, Trail
from headrace.console.connection import REQUEST_SECONDS, BrokerAddress, wait_connected
from headrace.console.logins import STREAMS_MAX, Login, Logins, Notice
from headrace.errors import HeadraceError, LimitExceeded, NotAuthorized, Unavailable

T = TypeVar("T")
THEMES: Final = ("auto", "light", "dark")
_THEME_COOKIE: Final = "headrace_theme"
_FIELDS_MAX: Final = 2_000
_FIELD_BYTES_MAX: Final = 20 << 20
_KINDS: Final[Mapping[str, HTTPStatus]] = {
    "not_authorized": HTTPStatus.FORBIDDEN,
    "login_failed": HTTPStatus.FORBIDDEN,
    "unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "not_coordinator": HTTPStatus.SERVICE_UNAVAILABLE,
    "disk_full": HTTPStatus.SERVICE_UNAVAILABLE,
    "storage_failed": HTTPStatus.SERVICE_UNAVAILABLE,
    "refused_repeatedly": HTTPStatus.SERVICE_UNAVAILABLE,
    "unknown_topic": HTTPStatus.NOT_FOUND,
    "unknown_partition": HTTPStatus.NOT_FOUND,
    "unknown_group": HTTPStatus.NOT_FOUND,
    "unknown_message": HTTPStatus.NOT_FOUND,
    "unknown_schema": HTTPStatus.NOT_FOUND,
    "no_such_entry": HTTPStatus.NOT_FOUND,
    "topic_exists": HTTPStatus.CONFLICT,
    "entry_exists": HTTPStatus.CONFLICT,
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Options of the console."""

    broker: BrokerAddress
    root_path: str = ""
    is_read_only: bool = False
    is_tls: bool = False
    cookie: str = "headrace_console"


class Console:
    """State that all visits use."""

    def __init__(self, settings: Settings, trail: Trail) -> None:
        self.settings, self.trail = settings, trail
        self.logins = Logins(settings.broker)
        self.templates = _environment(settings)


class BadForm(Exception):
    """A form without its token, or with wrong fields."""


class ReadOnly(Exception):
    """An action in a console that only shows."""


def _environment(settings: Settings) -> Environment:
    made = Environment(
        loader=PackageLoader("headrace.console", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        visible=text.visible,
        lines=lambda content: text.visible(content, lines=True),
        preview=text.preview,
        moment=text.moment,
        size=text.size_text,
        number=text.number,
        duration=text.duration,
    )
    made.globals.update(root=settings.root_path, version=__version__, link=lambda path, **query: link(settings.root_path, path, **query))
    return made


def link(root: str, path: str, **query: object) -> str:
    """Return a URL of the console. Empty values are left out."""
    pairs = [(name.rstrip("_"), value) for name, value in query.items() if value not in (None, "")]
    return f"{root}{path}" + (f"?{urlencode(pairs, doseq=True)}" if pairs else "")


class Form:
    """Fields of a submitted form."""

    def __init__(self, fields: Mapping[str, Sequence[str]], files: Mapping[str, bytes]) -> None:
        self._fields, self.files = fields, files

    def __getitem__(self, name: str) -> str:
        return self.get(name)

    def get(self, name: str, default: str = "") -> str:
        found = self._fields.get(name)
        return found[0] if found else default

    def all(self, name: str) -> list[str]:
        return list(self._fields.get(name, ()))

    def number(self, name: str) -> int | None:
        """Return a number; None if the field is empty. Raises `BadForm`."""
        given = self[name].strip()
        if not given:
            return None
        if not given.isascii() or not given.isdigit() or len(given) > 19:
            raise BadForm(f"{name.replace('_', ' ')}: expected a number, got {given[:40]!r}")
        return int(given)


class Visit:
    """A request with its login."""

    def __init__(self, request: Request, console: Console, login: Login) -> None:
        self.request, self.console, self.login = request, console, login
        self.query: Mapping[str, str] = request.query_params

    @property
    def client(self) -> FlyMqClient:
        return self.login.account.client

    def given(self, name: str, default: str = "") -> str:
        return self.query.get(name, default)

    def number(self, name: str, default: int, low: int = 0, high: int = (1 << 63) - 1) -> int:
        """Return a number of the query, moved into its bounds; the default if it is not one."""
        found = self.given(name)
        return min(max(int(found), low), high) if found.isascii() and found.isdigit() and len(found) <= 19 else default

    async def ask(self, work: Awaitable[T]) -> T:
        """Wait for the broker, with a limit. Raises `TimeoutError`."""
        async with asyncio.timeout(REQUEST_SECONDS):
            return await work

    async def call(self, operation: str, **arguments: object) -> Any:
        return await self.ask(self.client.call(operation, **arguments))

    async def manage(self, operation: str, **arguments: object) -> Any:
        return await self.ask(self.client.manage(operation, **arguments))

    # Answers.

    def show(self, template: str, code: int = 200, /, **context: object) -> HTMLResponse:
        """Return a page. Notices are shown once."""
        notices, self.login.notices = self.login.notices, []
        return HTMLResponse(render(self.console, self.request, template, login=self.login, notices=notices, **context), code)

    def part(self, template: str, **context: object) -> str:
        """Return a part of a page, for streams and for lists that are filtered as one types."""
        return render(self.console, self.request, template, login=self.login, notices=[], **context)

    def go(self, path: str, **query: object) -> RedirectResponse:
        return RedirectResponse(link(self.console.settings.root_path, path, **query), 303)

    def command(self, *words: object) -> str:
        """Return the equivalent command line."""
        user = ["--user", self.login.user] if self.login.user else []
        return command_line([*map(str, words)], [*self.console.settings.broker.arguments, *user])

    # Actions.

    async def form(self) -> Form:
        """Read the form of an action. Raises `BadForm` without its token, `ReadOnly`."""
        form = await read_form(self.request)
        check_token(self.login, form)
        if self.console.settings.is_read_only:
            raise ReadOnly
        return form

    async def act(self, action: str, command: str, work: Awaitable[T], *, note: Callable[[T], str] | None = None) -> bool:
        """Do something, keep it in the audit trail, and leave a notice for the next page. Return whether it succeeded."""
        try:
            await wait_connected(self.client)
            result = await self.ask(work)
        except (HeadraceError, TimeoutError) as failure:
            close = getattr(work, "close", None)
            if close is not None:
                close()
            reason = message_of(failure)
            self._note(action, command, f"failure: {reason}")
            self.login.notices.append(Notice(f"{action}: {reason}", command, is_error=True))
            return False
        self._note(action, command, "success")
        self.login.notices.append(Notice(f"{action}: {note(result)}" if note is not None else f"{action}: done", command))
        return True

    def _note(self, action: str, command: str, result: str) -> None:
        address = self.request.client.host if self.request.client else ""
        self.console.trail.note(Entry(int(time.time() * 1000), self.login.user or "anonymous", address, action, command, result))

    # Streams.

    def stream(self, events: Callable[[FlyMqClient], AsyncIterator[str]]) -> StreamingResponse:
        """Return server-sent events, produced with a connection of their own. Raises `LimitExceeded`.

        If the broker goes away the stream ends, and the browser opens it again.
        """
        account = self.login.account
        if account.streams >= STREAMS_MAX:
            raise LimitExceeded(f"{STREAMS_MAX} live pages of this login are open: close one")

        async def content() -> AsyncIterator[str]:
            account.streams += 1
            client: FlyMqClient | None = None
            try:
                yield "retry: 1000\n\n"
                client = await account.another(self.console.settings.broker)
                async for event in events(client):
                    yield event
            except (HeadraceError, TimeoutError) as failure:
                # The browser tries again by itself, which helps only if the broker was away.
                is_away = status_of_error(failure) == HTTPStatus.SERVICE_UNAVAILABLE
                yield event_of("trouble" if is_away else "refused", message_of(failure))
            finally:
                account.streams -= 1
                if client is not None:
                    client.abandon()

        return StreamingResponse(content(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})


def command_line(words: Sequence[str], options: Sequence[str] = ()) -> str:
    """Return a command line. Arguments that begin with a hyphen, such as a message -1, come last, after --."""
    count = 1 if words[0] in ("pub", "fetch", "status") else 2
    arguments = list(takewhile(lambda word: not word.startswith("--") and word not in ("-n", "-o"), words[count:]))
    if not any(word.startswith("-") for word in arguments):
        return "headrace " + shlex.join([*words, *options])
    return "headrace " + shlex.join([*words[:count], *words[count + len(arguments) :], *options, "--", *arguments])


def event_of(name: str, data: str) -> str:
    """Return one server-sent event."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines() or [""])
    return f"event: {name}\n{lines}\n"


def render(console: Console, request: Request, template: str, **context: object) -> str:
    theme = request.cookies.get(_THEME_COOKIE, "auto")
    login = context.get("login")
    found: str = console.templates.get_template(template).render(
        theme=theme if theme in THEMES else "auto",
        path=request.url.path,
        here=str(request.url.path) + (f"?{request.url.query}" if request.url.query else ""),
        is_writable=not console.settings.is_read_only,
        form_token=login.token if isinstance(login, Login) else "",
        address=str(console.settings.broker.address),
        **context,
    )
    return found


async def read_form(request: Request) -> Form:
    form = await request.form(max_fields=_FIELDS_MAX, max_part_size=_FIELD_BYTES_MAX)
    fields: dict[str, list[str]] = {}
    files: dict[str, bytes] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            files[name] = await value.read()
        else:
            fields.setdefault(name, []).append(value)
    return Form(fields, files)


def check_token(login: Login, form: Form) -> None:
    if not hmac.compare_digest(form["token"].encode(), login.token.encode()):
        raise BadForm("the form is older than this login: go back, reload the page and send it again")


def message_of(failure: BaseException) -> str:
    """Return the text of an error for a person."""
    if isinstance(failure, TimeoutError):
        return f"the broker did not reply within {REQUEST_SECONDS:g} s; whether it acts is unknown"
    return str(getattr(failure, "text", "") or failure)


def status_of_error(failure: BaseException) -> int:
    """Return the HTTP status of an error."""
    if isinstance(failure, (TimeoutError, ConnectFailed, RefusedRepeatedly, Unavailable)):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(failure, (NotAuthorized, ReadOnly)):
        return HTTPStatus.FORBIDDEN
    kind = getattr(failure, "kind", "") or getattr(failure, "code", "")
    return _KINDS.get(kind, HTTPStatus.BAD_REQUEST) if isinstance(kind, str) else HTTPStatus.BAD_REQUEST


def error_page(console: Console, request: Request, failure: BaseException, login: Login | None) -> Response:
    """Return the page of an error. A broker that is away is tried again."""
    status = HTTPStatus(status_of_error(failure))
    reason = "This console only shows: it was started with --read-only." if isinstance(failure, ReadOnly) else message_of(failure)
    content = render(console, request, "error.html", login=login, notices=[], status=status, reason=reason)
    headers = {"retry-after": "3"} if status is HTTPStatus.SERVICE_UNAVAILABLE else None
    return HTMLResponse(content, status, headers)


__all__ = ["BadForm", "Console", "Form", "Markup", "Settings", "Visit", "error_page", "event_of", "link"]
