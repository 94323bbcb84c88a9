"""The console as an ASGI application: every address with its page."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from headrace.clients.errors import ConnectFailed
from headrace.console.audit import Trail
from headrace.console.connection import wait_connected
from headrace.console.guard import Guard
from headrace.console.logins import Login
from headrace.console.pages import (
    access,
    audit,
    dead_letters,
    delayed,
    entry,
    groups,
    messages,
    overview,
    pipelines,
    publishing,
    schemas,
    topics,
)
from headrace.console.visits import BadForm, Console, ReadOnly, Settings, Visit, error_page, link
from headrace.errors import BrokerError, HeadraceError

Page = Callable[[Visit], Awaitable[Response]]
_STATIC: Final = Path(__file__).parent / "static"
PAGES: Final[tuple[tuple[str, Page, str], ...]] = (
    ("/", overview.overview, "GET"),
    ("/live", overview.live, "GET"),
    ("/topics", topics.topics, "GET"),
    ("/topics/new", topics.new, "GET POST"),
    ("/topic", topics.topic, "GET"),
    ("/topic/alter", topics.alter, "GET POST"),
    ("/topic/delete", topics.delete, "GET POST"),
    ("/topic/schema", topics.schema, "POST"),
    ("/messages", messages.messages, "GET"),
    ("/messages/search", messages.search_stream, "GET"),
    ("/messages/tail", messages.tail_stream, "GET"),
    ("/messages/export", messages.export, "GET"),
    ("/message", messages.message, "GET"),
    ("/message/download", messages.download, "GET"),
    ("/publish", publishing.publish, "GET POST"),
    ("/groups", groups.groups, "GET"),
    ("/group", groups.group, "GET"),
    ("/group/reset", groups.reset, "GET POST"),
    ("/group/delete", groups.delete, "GET POST"),
    ("/dead-letters", dead_letters.summary, "GET"),
    ("/dead-letters/of", dead_letters.letters, "GET"),
    ("/dead-letters/preview", dead_letters.preview, "POST"),
    ("/dead-letters/do", dead_letters.do, "POST"),
    ("/delayed", delayed.delayed, "GET"),
    ("/delayed/cancel", delayed.cancel, "POST"),
    ("/schemas", schemas.schemas, "GET"),
    ("/schemas/new", schemas.new, "GET POST"),
    ("/schema", schemas.schema, "GET"),
    ("/schema/delete", schemas.delete, "GET POST"),
    ("/pipelines", pipelines.pipelines, "GET"),
    ("/pipeline", pipelines.pipeline, "GET"),
    ("/pipeline/stop", pipelines.stop, "POST"),
    ("/access", access.users, "GET"),
    ("/access/user", access.user, "GET POST"),
    ("/access/roles", access.roles, "GET POST"),
    ("/access/rules", access.rules, "GET POST"),
    ("/access/keys", access.keys, "GET POST"),
    ("/access/check", access.check, "GET"),
    ("/audit", audit.audit, "GET"),
    ("/audit/console", audit.console, "GET"),
    ("/logout", entry.log_out, "POST"),
)


def create_console(settings: Settings, *, hosts: Iterable[str], audit_file: Path | None = None) -> ASGIApp:
    """Return the application. `hosts` are the names under which it may be called."""
    trail = Trail(audit_file)

    @asynccontextmanager
    async def lifespan(application: Starlette) -> AsyncIterator[dict[str, Console]]:
        # The connections belong to the event loop that serves.
        console = Console(settings, trail)
        try:
            yield {"console": console}
        finally:
            await console.logins.close()
            trail.close()

    routes = [
        Route("/login", entry.log_in, methods=["GET", "POST"]),
        Route("/theme", entry.theme, methods=["POST"]),
        *(Route(path, _endpoint(page), methods=methods.split()) for path, page, methods in PAGES),
        Mount("/static", StaticFiles(directory=_STATIC), name="static"),
    ]
    application = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: _not_found})
    return Guard(application, hosts=hosts, root_path=settings.root_path, is_tls=settings.is_tls)


def _endpoint(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        console: Console = request.state.console
        login, is_new = None, False
        try:
            login = console.logins.find(request.cookies.get(console.settings.cookie, ""))
            if login is None:
                if _is_from_elsewhere(request):
                    return _again(console)
                login, is_new = await console.logins.enter(), True
            if login is None:
                return entry.to_login(console, request)
            await wait_connected(login.account.client)
            response = await page(Visit(request, console, login))
        except (HeadraceError, TimeoutError, BadForm, ReadOnly) as failure:
            response = error_page(console, request, _plain(failure), login)
        if is_new and login is not None:
            entry.set_cookie(response, console, login)
        return response

    return endpoint


def _plain(failure: BaseException) -> BaseException:
    if isinstance(failure, ConnectFailed):
        return BrokerError(f"{failure}; the console tries again") if failure.was_accepted else failure
    return failure


def _is_from_elsewhere(request: Request) -> bool:
    """Return whether another site links here: the browser then holds back a strict cookie, although there may be one."""
    return request.method == "GET" and request.headers.get("sec-fetch-site") == "cross-site"


def _again(console: Console) -> Response:
    """Return a page that loads itself once more, now as a link of this site."""
    return HTMLResponse('<!doctype html><html lang="en"><title>Headrace</title><meta http-equiv="refresh" content="0">')


async def _not_found(request: Request, failure: Exception) -> Response:
    console: Console = request.state.console
    assert isinstance(failure, HTTPException)
    home = link(console.settings.root_path, "/")
    text = "There is no such page." if failure.status_code == 404 else failure.detail
    return HTMLResponse(
        f'<!doctype html><html lang="en"><title>Headrace</title><h1>{text}</h1><p><a href="{home}">Overview</a></p>', failure.status_code
    )


__all__ = ["Login", "create_console"]
