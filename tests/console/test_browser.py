"""The console in a real browser: chromium through selenium, one for the whole module."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from axe_core_python.selenium import Axe
from selenium.common.exceptions import TimeoutException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import Select, WebDriverWait

from headrace.clients.flymq.client import FlyMqClient
from headrace.console.reading import Progress, search
from tests.console.harness import ADMIN_PASSWORD, BrokerThread, ConsoleThread, running

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
WAIT_SECONDS = 300.0
PASSWORD = "a long user password"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--force-color-profile=srgb"),
)
WATCH = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.__violations.push(event.violatedDirective + " " + event.blockedURI));
window.addEventListener("error", (event) => window.__violations.push("error " + event.message));
window.alert = () => window.__violations.push("alert");
"""


def chromium(profile: Path) -> Chrome:
    options = ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium") or ""
    driver = Chrome(options=options, service=Service(shutil.which("chromedriver") or ""))
    driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": WATCH})
    driver.set_window_size(1200, 900)
    driver.set_script_timeout(300)
    return driver


WIDEST: Final = "return [...document.querySelectorAll('*')].sort((a, b) => b.scrollWidth - a.scrollWidth)[0].outerHTML.slice(0, 300)"
"""The widest element of a page."""


class Pages:
    """A browser at a console. Every page it leaves must be free of violations of the content security policy and of script errors."""

    def __init__(self, driver: Chrome, console: ConsoleThread) -> None:
        self.driver, self.console = driver, console

    def open(self, path: str) -> None:
        self.check()
        self.driver.get(self.console.url + path)

    def check(self) -> None:
        found = self.driver.execute_script("return window.__violations || []")
        assert found == [], found

    @property
    def text(self) -> str:
        return self.driver.find_element(By.TAG_NAME, "body").text

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def fill(self, **fields: str) -> None:
        for name, text in fields.items():
            place = self.find(f"main [name={name}]:not([type=hidden])")
            if place.tag_name == "select":
                Select(place).select_by_value(text)
            else:
                place.clear()
                place.send_keys(text)

    def press(self, text: str) -> None:
        """Press a button or follow a link of the page by its text, once it is there. A page that is being left has stale elements."""
        found: list[WebElement] = []

        def is_there() -> bool:
            found[:] = [one for one in self.all("main button, main a") if one.text.strip() == text and one.is_displayed()]
            self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", found[0])
            return True

        self.until(is_there)
        found[0].click()

    def until(self, condition: Callable[[], Any]) -> None:
        WebDriverWait(self.driver, WAIT_SECONDS, 0.05, [Exception]).until(lambda _: condition())

    def sees(self, *words: str) -> None:
        self.until(lambda: all(word in self.text for word in words))

    def log_in(self, user: str, password: str) -> None:
        self.driver.delete_all_cookies()
        self.open("/login")
        self.fill(user=user, password=password)
        self.press("Log in")
        self.sees("Overview", user)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    made = chromium(tmp_path_factory.mktemp("profile"))
    yield made
    made.quit()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerThread, ConsoleThread]]:
    with running(tmp_path_factory.mktemp("browser")) as (broker, console):
        broker.call("topic.create", topic="orders", partitions=3)
        rows: list[dict[str, object]] = [
            {"key": f"customer-{n}", "value": json.dumps({"order": n, "items": [{"sku": n, "count": 1}]}), "headers": [("trace", f"t{n}")]}
            for n in range(300)
        ]
        broker.publish("orders", *rows)

        async def more(client: FlyMqClient) -> None:
            await client.commit("orders", 20, group="billing", partition=0)
            await client.create_topic("rejected")
            await client.register_schema("object", "json", b'{"type": "object"}')
            await client.require_schema("rejected", "object", on_invalid="dead_letter")
            for number in range(4):
                await client.publish("rejected", f"no object {number}".encode())
            await client.publish_delayed("orders", b"later", delay_ms=3_600_000)

        broker.with_client(more)
        yield broker, console


@pytest.fixture
def broker(site: tuple[BrokerThread, ConsoleThread]) -> BrokerThread:
    return site[0]


@pytest.fixture
def pages(driver: Chrome, site: tuple[BrokerThread, ConsoleThread]) -> Iterator[Pages]:
    made = Pages(driver, site[1])
    yield made
    made.check()
    driver.get("about:blank")


PATHS = (
    *("/", "/topics", "/topics/new", "/topic?name=orders", "/topic/alter?name=orders", "/topic/delete?name=orders"),
    *("/messages?topic=orders", "/messages?topic=orders&live=1", "/message?topic=orders&partition=0&offset=1", "/publish?topic=orders"),
    *("/groups", "/group?name=billing", "/group/reset?name=billing&topic=orders&to=latest"),
    *("/dead-letters", "/dead-letters/of?topic=rejected", "/delayed", "/schemas", "/schemas/new", "/schema?name=object"),
    *("/pipelines", "/access", "/access/roles", "/access/rules", "/access/keys", "/access/check?user=a&action=read&kind=topic&resource=x"),
    *("/audit", "/audit/console", "/topic?name=nowhere"),
)


COLOURFUL = (
    "/",
    "/topic?name=orders",
    "/message?topic=orders&partition=0&offset=1",
    "/dead-letters/of?topic=rejected",
    "/schema?name=object",
)
"""Pages that have all colours between them."""
LAYOUTS = tuple(
    path
    for path in PATHS
    if path.partition("?")[0]
    not in ("/topic/alter", "/topic/delete", "/dead-letters", "/access/roles", "/access/keys", "/audit/console", "/schemas/new", "/delayed")
)
"""Pages that differ in their parts."""


def test_every_page_satisfies_axe_in_both_themes_and_fits_360_pixels(pages: Pages) -> None:
    axe = Axe()
    wrong: list[str] = []
    pages.open("/")
    for theme, paths in (("light", LAYOUTS), ("dark", COLOURFUL)):
        pages.driver.add_cookie({"name": "headrace_theme", "value": theme})
        for path in paths:
            pages.open(path)
            results = axe.run(pages.driver)
            wrong += [f"{theme} {path}: {one['id']} {one['nodes'][0]['html'][:160]}" for one in results["violations"]]
    pages.driver.delete_cookie("headrace_theme")
    pages.driver.set_window_size(500, 800)
    pages.driver.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    )
    for path in PATHS:
        pages.open(path)
        try:  # the browser takes over the width some time after it has loaded a page
            pages.until(lambda: pages.driver.execute_script("return document.documentElement.scrollWidth") <= 360)
        except TimeoutException:
            wrong.append(f"{path} is too wide: {pages.driver.execute_script(WIDEST)}")
    pages.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    pages.driver.set_window_size(1200, 900)
    assert not wrong, "\n".join(wrong)


def test_topics_are_filtered_while_one_types_and_the_address_follows(pages: Pages) -> None:
    pages.open("/topics")
    pages.find("#q").send_keys("rejec")
    pages.until(lambda: [row.text for row in pages.all("#list tbody a")][:1] == ["rejected"])
    pages.until(lambda: "q=rejec" in pages.driver.current_url)
    pages.driver.refresh()
    assert pages.find("#q").get_attribute("value") == "rejec" and "2 of" in pages.text
    pages.find("#list tbody a").click()
    pages.sees("Partitions", "Settings")
    pages.driver.back()
    pages.sees("2 of")


def test_a_topic_is_created_and_deleted_by_keyboard(pages: Pages, broker: BrokerThread) -> None:
    pages.open("/topics/new")
    pages.driver.switch_to.active_element.send_keys("by-keyboard", Keys.ENTER)
    pages.sees("Create topic by-keyboard: done", "headrace topic create by-keyboard")
    pages.press("Delete")
    pages.driver.switch_to.active_element.send_keys("by-keyboard", Keys.TAB, Keys.ENTER)
    pages.sees("Delete topic by-keyboard: done")
    pages.open("/")
    pages.find("body").send_keys(Keys.TAB)
    assert pages.driver.switch_to.active_element.text == "Skip to the content"


def test_a_message_is_opened_folded_and_published_again(pages: Pages) -> None:
    pages.open("/messages?topic=orders")
    assert len(pages.all(".record")) == 50
    pages.find(".record summary").click()
    nodes = pages.all(".record details[open] .json details")
    assert nodes and nodes[0].get_attribute("open") is not None
    nodes[0].find_element(By.TAG_NAME, "summary").click()
    assert nodes[0].get_attribute("open") is None
    pages.press("Older")
    pages.until(lambda: "at=" in pages.driver.current_url and len(pages.all(".record")) == 50)
    pages.driver.back()
    pages.until(lambda: "at=" not in pages.driver.current_url)
    pages.open("/messages?topic=orders&start=earliest")
    pages.find(".record summary").click()
    pages.find(".record details[open] .links a[href*=publish]").click()
    pages.sees("Publish to orders")
    assert "order" in (pages.find("#value").get_attribute("value") or "")
    pages.fill(value='{"order": "again"}')
    pages.find("main form button[type=submit]").click()
    pages.sees("Publish to orders: partition", '"again"', "headrace pub orders")


def test_a_search_streams_its_matches(pages: Pages) -> None:
    pages.open("/messages?topic=orders")
    pages.fill(q="customer-29")
    pages.press("Show")
    pages.sees("Finished: 11 found in 30", "Every record was searched")
    assert "stream=1" in pages.driver.current_url and len(pages.all(".record")) == 11
    assert not pages.find("#stop").is_displayed()


def test_the_stop_button_ends_a_search_and_keeps_its_matches(pages: Pages, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    async def endless(*arguments: Any, **named: Any) -> AsyncIterator[Progress]:
        """Search the first partition, and wait for the next one until the page leaves."""
        try:
            async for progress in search(*arguments, **named):
                yield progress
                await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr("headrace.console.pages.messages.search", endless)
    pages.open("/messages?topic=orders")
    pages.fill(q="customer-29")
    pages.press("Show")
    pages.sees("found in")
    found = len(pages.all(".record"))
    assert found > 0 and not ended.is_set()
    pages.press("Stop")
    pages.sees("Stopped: ", "found in")
    assert not pages.find("#stop").is_displayed() and len(pages.all(".record")) == found
    assert ended.wait(WAIT_SECONDS), "the console goes on searching"


def test_the_live_tail_shows_new_records_pauses_and_survives_a_restart_of_the_broker(pages: Pages, broker: BrokerThread) -> None:
    pages.open("/messages?topic=orders&live=1")
    pages.sees("Live, 0 received")
    broker.publish("orders", {"value": "first live"})
    pages.sees("first live", "Live, 1 received")
    pages.press("Pause")
    broker.publish("orders", {"value": "second live"})
    pages.sees("Paused, 1 waiting")
    assert "second live" not in pages.text
    pages.press("Continue")
    pages.sees("second live", "Live, 2 received")
    broker.stop()
    pages.until(lambda: pages.find("#trouble").is_displayed())
    broker.open()
    broker.publish("orders", {"value": "after the restart"})
    pages.sees("after the restart")
    pages.until(lambda: not pages.find("#trouble").is_displayed())


def test_the_overview_is_live_and_survives_a_restart_of_the_broker(pages: Pages, broker: BrokerThread) -> None:
    pages.open("/")
    pages.sees("Needs attention", "4 dead letters of rejected", "Last 5 minutes", "billing")
    broker.call("topic.create", topic="seen-live", partitions=1)
    count = len(broker.call("topic.list"))
    pages.until(lambda: f"Topics\n{count}\n" in pages.text)
    broker.stop()
    pages.until(lambda: pages.find("#trouble").is_displayed())
    pages.driver.execute_script("window.__same = true")
    broker.open()
    broker.call("topic.create", topic="seen-live-2", partitions=1)
    pages.until(lambda: f"Topics\n{count + 1}\n" in pages.text)
    assert pages.driver.execute_script("return window.__same"), "the page was not loaded again"


def test_a_page_opened_while_the_broker_is_away_loads_itself_when_it_is_back(pages: Pages, broker: BrokerThread) -> None:
    broker.stop()
    pages.open("/topics")
    pages.sees("does not answer")
    broker.open()
    pages.sees("orders", "Partitions")


def test_a_group_is_reset_with_a_preview(pages: Pages) -> None:
    pages.open("/group?name=billing")
    pages.sees("Lag", "No member is connected")
    pages.press("Reset offsets")
    pages.fill(to="offset", value="7")
    pages.press("Preview")
    pages.sees("After the reset")
    pages.press("Reset offsets")
    pages.sees("Reset group billing in orders: done", "--to-offset 7")


def test_a_dead_letter_is_replayed_and_another_purged(pages: Pages, broker: BrokerThread) -> None:
    broker.call("schema.release", topic="rejected")
    pages.open("/dead-letters")
    pages.press("rejected")
    pages.sees("4 waiting", "rejected")
    pages.all("input[name=id]")[0].click()
    pages.press("Replay chosen")
    pages.sees("Replay 1 dead letter", "no object 0")
    pages.press("Replay 1")
    pages.sees("3 waiting", "headrace dlq replay rejected 0-0")
    pages.all("input[name=id]")[0].click()
    pages.press("Purge chosen")
    pages.press("Purge 1")
    pages.sees("2 waiting", "headrace dlq discard rejected 0-1")
    pages.press("Replay all")
    pages.press("Replay 2")
    pages.sees("0 waiting")
    assert broker.call("topic.describe", topic="rejected")["partitions"][0]["end"] == 3


def test_a_delayed_message_is_cancelled(pages: Pages) -> None:
    pages.open("/delayed")
    (button,) = pages.all("main td button")
    button.click()
    pages.sees("done", "No message waits")


def test_a_schema_is_checked_and_registered(pages: Pages) -> None:
    pages.open("/schemas/new?name=object")
    pages.fill(definition='{"type": "object", "required": ["a"]}')
    pages.press("Check compatibility")
    pages.sees("Not compatible")
    pages.fill(compatibility="none")
    pages.press("Check and register")
    pages.sees("Register schema object: version 2", "Changes from version 1", '"required": [')


def test_the_pipeline_page_draws_the_graph_and_asks_for_a_stop(pages: Pages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.spark.pipelines.executions import Execution
    from headrace.spark.pipelines.files import load
    from headrace.spark.pipelines.progress import QueryState

    monkeypatch.setenv("HEADRACE_PIPELINES", str(tmp_path / "entries"))
    made = load(Path(__file__).parents[2] / "examples/orders/pipeline.toml", checkpoint=str(tmp_path / "checkpoint"))
    now = int(time.time() * 1000)
    with Execution(made.name, made.checkpoint, file="orders.toml", graph=made.graph(), now_ms=now) as execution:
        queries = [QueryState(name, "running", 3, 1_000, 50.0, 60.0, 900, 12).plain() for name in made.sinks]
        execution.write("running", queries, now_ms=now, master="local[2]")
        pages.open("/pipelines")
        pages.sees("orders", "running", "2,000")
        pages.press("orders")
        pages.sees("group by window(at, '1 minute')", "Checkpoint", "900 ms")
        drawn = [one.text for one in pages.all("svg.graph text.title")]
        assert drawn == ["orders", "by_minute", "totals", "table"] and len(pages.all("svg.graph path.edge")) == 3
        pages.press("Stop")
        pages.sees("Stop pipeline orders: it ends after its current batches", "headrace pipeline stop orders")
        assert execution.is_stop_wanted


def test_hostile_contents_do_nothing(pages: Pages, broker: BrokerThread) -> None:
    evil = "<img/src=x/onerror=alert(1)>"
    broker.call("topic.create", topic=evil, partitions=1)
    hostile: list[dict[str, object]] = [
        {
            "value": "<script>alert(1)</script><img src=x onerror=alert(1)>",
            "key": "<b>bold</b>",
            "headers": [("<i>", "<svg onload=alert(1)>")],
        },
        {"value": json.dumps({"<script>alert(1)</script>": "</span><img src=x onerror=alert(1)>"}), "key": "\u202egnp.exe"},
        {"value": b"\x1b[31m\xff\xfe", "key": "k" * 60_000},
    ]
    broker.publish(evil, *hostile)
    from urllib.parse import quote

    name = quote(evil)
    for path in (
        f"/topic?name={name}",
        f"/messages?topic={name}",
        f"/messages?topic={name}&live=1",
        f"/messages?topic={name}&q=img&stream=1",
    ):
        pages.open(path)
        for summary in pages.all(".record > details > summary"):
            summary.click()
        pages.sees("<img/src=x/onerror=alert(1)>")
        pages.check()
        assert not pages.all("main img") and not pages.all("main script") and not pages.all("main b")
    pages.open(f"/message?topic={name}&partition=0&offset=1")
    pages.sees("\\u202egnp.exe")
    pages.open("/")
    pages.check()


def test_the_theme_is_switched(pages: Pages) -> None:
    pages.open("/topics")
    Select(pages.find("#theme")).select_by_visible_text("dark")
    pages.until(lambda: pages.find("html").get_attribute("data-theme") == "dark")
    assert pages.find("body").value_of_css_property("background-color") == "rgba(18, 22, 29, 1)"
    Select(pages.find("#theme")).select_by_visible_text("auto")
    pages.until(lambda: pages.find("html").get_attribute("data-theme") == "auto")


def test_copy_buttons_appear_and_copy(pages: Pages) -> None:
    pages.driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]})
    pages.open("/message?topic=orders&partition=0&offset=1&format=text")
    pages.find(".record .copy").click()
    pages.until(lambda: pages.find(".record .copy").text == "Copied")


def test_two_users_with_different_rights_see_different_consoles(driver: Chrome, tmp_path_factory: pytest.TempPathFactory) -> None:
    with running(tmp_path_factory.mktemp("two"), is_enforced=True) as (broker, console):

        async def prepare(client: FlyMqClient) -> None:
            await client.create_topic("orders")
            await client.publish("orders", b"confidential")
            grants = [{"actions": ["describe", "alter", "delete"], "kind": "topic", "match": "prefix", "name": ""}]
            await client.manage("role.put", name="operator", grants=grants, description="")
            await client.create_user("olga", PASSWORD, ["operator"])
            await client.create_user("rita", PASSWORD, ["consumer"])

        broker.with_client(prepare)
        pages = Pages(driver, console)
        pages.open("/topic?name=orders")
        pages.sees("Log in")
        pages.fill(user="rita", password="wrong")
        pages.press("Log in")
        pages.sees("invalid username or password")
        pages.fill(user="rita", password=PASSWORD)
        pages.press("Log in")
        pages.sees("orders", "Partitions", "rita")  # the page that was asked for
        pages.open("/messages?topic=orders")
        pages.sees("confidential")
        pages.open("/topic/delete?name=orders")
        pages.fill(confirm="orders")
        pages.press("Delete topic")
        pages.sees("rita may not delete")
        pages.find("header form[action$=logout] button").click()
        pages.sees("Log in")
        pages.log_in("olga", PASSWORD)
        pages.open("/messages?topic=orders")
        pages.sees("olga may not read")
        assert "confidential" not in driver.page_source
        pages.open("/messages?topic=orders&live=1")
        pages.sees("olga may not read")
        pages.log_in("admin", ADMIN_PASSWORD)
        pages.open("/access")
        pages.fill(name="tim", password=PASSWORD, again=PASSWORD)
        pages.find("input[name=role][value=consumer]").click()
        pages.press("Create user")
        pages.sees("Create user tim: done")
        pages.open("/access/rules")
        pages.fill(effect="deny", name="tim", resource="orders")
        pages.find("input[name=action][value=read]").click()
        pages.press("Add rule")
        pages.sees("user:tim", "deny")
        pages.open("/access/check?user=tim&action=read&kind=topic&resource=orders")
        pages.sees("No: tim may not read topic orders", "a rule for user:tim denies it on topic:orders")
        pages.open("/access/keys")
        pages.fill(owner="rita", scopes="read@topic:orders")
        pages.press("Create key")
        pages.sees("shown only now", "hr_")
        pages.open("/audit?by=rita&type=denial")
        pages.sees("topic:orders", "denied")
        pages.check()
        driver.get("about:blank")
