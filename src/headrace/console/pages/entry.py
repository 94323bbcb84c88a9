"""Login, logout and theme: the pages that need no login."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from headrace.console.logins import Login, login_error
from headrace.console.visits import THEMES, Console, Visit, error_page, link, read_form, render
from headrace.errors import HeadraceError

_YEAR_SECONDS: Final = 365 * 24 * 3600


def set_cookie(response: Response, console: Console, login: Login) -> None:
    settings = console.settings
    response.set_cookie(settings.cookie, login.id, path=settings.root_path or "/", secure=settings.is_tls, httponly=True, samesite="strict")


def to_login(console: Console, request: Request) -> Response:
    """Return a redirection to the login, which returns to this page."""
    here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(link(console.settings.root_path, "/login") + (f"?to={quote(here)}" if request.method == "GET" else ""), 303)


def _target(console: Console, wanted: str) -> str:
    """Return an address of this console: a login must not lead to another site."""
    is_own = wanted.startswith("/") and not wanted.startswith(("//", "/\\", "/login"))
    return console.settings.root_path + (wanted if is_own else "/")


async def log_in(request: Request) -> Response:
    """Show the login form, and log in. The form has no token because there is no login yet: the origin is checked instead."""
    console: Console = request.state.console
    wanted = request.query_params.get("to", "/")
    try:
        if await console.logins.is_open():
            return RedirectResponse(_target(console, wanted), 303)
    except (HeadraceError, TimeoutError) as failure:
        return error_page(console, request, failure, None)
    error, name = "", ""
    if request.method == "POST":
        form = await read_form(request)
        name = form["user"]
        try:
            login = await console.logins.log_in(name, form["password"])
        except HeadraceError as failure:
            error = login_error(failure)
        else:
            response = RedirectResponse(_target(console, form.get("to", "/")), 303)
            set_cookie(response, console, login)
            return response
    content = render(console, request, "login.html", login=None, notices=[], to=wanted, error=error, name=name)
    return HTMLResponse(content, 403 if error else 200)


async def log_out(visit: Visit) -> Response:
    from headrace.console.visits import check_token

    check_token(visit.login, await read_form(visit.request))
    visit.console.logins.log_out(visit.login)
    response = visit.go("/login")
    response.delete_cookie(visit.console.settings.cookie, path=visit.console.settings.root_path or "/")
    return response


async def theme(request: Request) -> Response:
    """Set the theme cookie and return to the page. Needs no token: it changes colours only."""
    console: Console = request.state.console
    form = await read_form(request)
    chosen = form["theme"] if form["theme"] in THEMES else "auto"
    response = RedirectResponse(_target(console, form.get("to", "/")), 303)
    path = console.settings.root_path or "/"
    response.set_cookie(
        "headrace_theme", chosen, max_age=_YEAR_SECONDS, path=path, secure=console.settings.is_tls, httponly=True, samesite="strict"
    )
    return response
