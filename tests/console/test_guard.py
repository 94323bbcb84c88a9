"""Host, origin, token, cookie and headers of the console."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.console.guard import BODY_BYTES_MAX, POLICY, host_name
from tests.console.harness import BrokerThread, Browser, ConsoleThread


def test_every_reply_has_the_content_security_policy(browser: Browser) -> None:
    for path in ("/", "/topics", "/nowhere", "/static/console.css", "/static/console.js", "/live?x"):
        if path.startswith("/live"):
            continue
        reply = browser.request("GET", path)
        assert reply.headers["content-security-policy"] == POLICY, path
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["x-frame-options"] == "DENY"
    assert "unsafe" not in POLICY


def test_pages_have_no_inline_script_or_style() -> None:
    folder = Path(__file__).parents[2] / "src/headrace/console/templates"
    for file in folder.glob("*.html"):
        text = file.read_text()
        assert " style=" not in text and "<style" not in text and " onclick" not in text and "javascript:" not in text, file
        assert "|safe" not in text.replace(" ", ""), file


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "127.0.0.2"])
def test_a_foreign_host_name_is_refused(browser: Browser, host: str) -> None:
    browser.host = host or " "
    assert browser.request("GET", "/").status in (400, 421)


@pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1", "console.test", "CONSOLE.test:443", "[::1]:80"])
def test_an_own_host_name_is_served(browser: Browser, host: str) -> None:
    browser.host = host
    assert browser.request("GET", "/").status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {"Sec_Fetch_Site": "", "Origin": "http://evil.example"},
        {"Sec_Fetch_Site": "", "Origin": "null"},
    ],
)
def test_a_form_of_another_site_is_refused(browser: Browser, headers: dict[str, str]) -> None:
    token = browser.get("/topics/new").token
    assert browser.post("/topics/new", {"token": token, "name": "forged"}, **headers).status == 403
    assert "forged" not in browser.get("/topics").text


def test_an_old_browser_with_the_right_origin_is_served(browser: Browser) -> None:
    token = browser.get("/topics/new").token
    origin = {"Sec_Fetch_Site": "", "Origin": f"http://127.0.0.1:{browser.port}"}
    assert browser.post("/topics/new", {"token": token, "name": "by-origin"}, **origin).status == 200
    assert "by-origin" in browser.get("/topics", q="by-origin").text


@pytest.mark.parametrize("token", ["", "wrong", "é"])
def test_a_form_without_its_token_does_nothing(browser: Browser, token: str) -> None:
    assert browser.post("/topics/new", {"token": token, "name": "tokenless"}).status == 400
    assert "tokenless" not in browser.get("/topics").words


def test_the_cookie_is_strict_and_hidden_from_scripts(browser: Browser) -> None:
    cookie = browser.request("GET", "/").headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie and "path=/" in cookie


def test_a_large_body_is_refused(browser: Browser) -> None:
    assert browser.request("POST", "/topics/new", None, Content_Length=str(BODY_BYTES_MAX + 1)).status == 413


def test_a_link_from_another_site_loads_the_page_again_with_its_cookie(browser: Browser) -> None:
    reply = browser.request("GET", "/topics", Sec_Fetch_Site="cross-site")
    assert reply.status == 200 and 'http-equiv="refresh"' in reply.text and "set-cookie" not in reply.headers


@pytest.mark.parametrize("target", ["//evil.example/", "https://evil.example/", "/\\evil.example"])
def test_a_redirection_never_leaves_the_console(browser: Browser, target: str) -> None:
    reply = browser.request("POST", "/theme", f"theme=dark&to={target}".encode(), Content_Type="application/x-www-form-urlencoded")
    assert reply.status == 303 and reply.headers["location"] == "/"


def test_hosts_are_compared_without_their_port() -> None:
    assert [host_name(host) for host in ("a:80", "a", "[::1]:80", "[::1]", "a:b")] == ["a", "a", "[::1]", "[::1]", "a:b"]


@pytest.mark.parametrize("is_stripped", [True, False])
def test_the_console_works_under_a_path_of_a_reverse_proxy(broker: BrokerThread, is_stripped: bool) -> None:
    console = ConsoleThread(broker, root_path="/tools/console")
    try:
        browser = Browser(console.port)
        broker.call("topic.create", topic=f"proxied-{is_stripped}", partitions=1)
        reply = browser.request("GET", "/topics" if is_stripped else "/tools/console/topics")
        assert reply.status == 200 and 'href="/tools/console/static/console.css"' in reply.text
        assert 'href="/topics' not in reply.text and f'href="/tools/console/topic?name=proxied-{is_stripped}"' in reply.text
        assert "Path=/tools/console" in reply.headers["set-cookie"]
        browser.root_path = "/tools/console"
        made = browser.post("/topics/new", {"name": f"made-{is_stripped}"})
        assert made.status == 200 and f"made-{is_stripped}" in made.words
    finally:
        console.close()


def test_a_read_only_console_shows_and_changes_nothing(broker: BrokerThread, tmp_path: Path) -> None:
    broker.call("topic.create", topic="kept", partitions=1)
    console = ConsoleThread(broker, is_read_only=True)
    try:
        browser = Browser(console.port)
        page = browser.get("/topic", name="kept")
        assert "read-only" in page.words and "Delete" not in page.words and "Publish" not in page.words
        for path in ("/topic/delete?name=kept", "/topics/new", "/publish?topic=kept"):
            token = browser.get(path).token
            reply = browser.post(path, {"token": token, "confirm": "kept", "name": "x", "topic": "kept", "value": "x"})
            assert reply.status == 403 and "--read-only" in reply.words, path
        assert broker.call("topic.describe", topic="kept")["partitions"][0]["end"] == 0
    finally:
        console.close()
