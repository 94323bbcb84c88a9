"""Take screenshots of every page at two widths and in both themes: `python -m tests.console.screenshots DIRECTORY`.

The broker is real and has topics with traffic, a group with lag, dead letters, schemas and the state of a pipeline.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from headrace.clients.flymq.client import FlyMqClient
from tests.console.harness import BrokerThread, ConsoleThread, running
from tests.console.test_browser import Pages, chromium

PAGES = {
    "overview": "/",
    "topics": "/topics",
    "topic-new": "/topics/new",
    "topic": "/topic?name=orders",
    "topic-alter": "/topic/alter?name=orders",
    "topic-delete": "/topic/delete?name=orders",
    "messages": "/messages?topic=orders",
    "messages-search": "/messages?topic=orders&q=customer-7&stream=1",
    "messages-live": "/messages?topic=orders&live=1",
    "message": "/message?topic=orders&partition=0&offset=3",
    "publish": "/publish?topic=orders&partition=0&offset=3",
    "groups": "/groups",
    "group": "/group?name=billing",
    "group-reset": "/group/reset?name=billing&topic=orders&to=latest",
    "dead-letters": "/dead-letters",
    "dead-letters-of": "/dead-letters/of?topic=payments",
    "delayed": "/delayed",
    "schemas": "/schemas",
    "schema": "/schema?name=payment",
    "schema-new": "/schemas/new?name=payment",
    "pipelines": "/pipelines",
    "pipeline": "/pipeline?checkpoint=CHECKPOINT",
    "access": "/access",
    "access-roles": "/access/roles",
    "access-rules": "/access/rules",
    "access-keys": "/access/keys",
    "access-check": "/access/check?user=ann&action=read&kind=topic&resource=orders",
    "audit": "/audit",
    "audit-console": "/audit/console",
    "error": "/topic?name=nowhere",
}
IMAGES = {"console-overview": ("/", 660), "console-pipeline": ("/pipeline?checkpoint=CHECKPOINT", 600)}
"""Images of the README: page and height."""
WIDTHS = {"wide": 1200, "narrow": 360}
_TRAFFIC_SECONDS = 45.0


async def prepare(client: FlyMqClient) -> None:
    await client.create_topic("orders", partitions=3)
    await client.create_topic("payments")
    await client.create_topic("audit.trail", partitions=6)
    await client.register_schema("payment", "json", b'{"type": "object", "properties": {"id": {"type": "integer"}}}')
    newer = b'{"type": "object", "properties": {"id": {"type": "integer"}, "note": {"type": "string"}}}'
    await client.register_schema("payment", "json", newer, compatibility="none")
    await client.require_schema("payments", "payment", on_invalid="dead_letter")
    for number in range(8):
        await client.publish("payments", json.dumps({"id": number if number % 2 else f"no. {number}"}).encode(), key=f"p{number}".encode())
    await client.publish_delayed("orders", b"reminder", delay_ms=3_600_000, key=b"customer-1")
    await client.create_user("ann", "a long user password", ["consumer"])
    await client.create_user("olga", "a long user password", ["producer", "consumer"])
    rule = {"kind": "topic", "match": "prefix", "name": "audit."}
    await client.manage("rule.add", subject="user:ann", effect="deny", actions=["read"], **rule)
    await client.manage("key.create", owner="ann", scopes=[], description="nightly export")


async def traffic(client: FlyMqClient, seconds: float) -> None:
    dice, number, end = random.Random(1), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(dice.randrange(20, 120)):
            number += 1
            order = {
                "order": number,
                "customer": f"customer-{number % 40}",
                "country": dice.choice(["DE", "FR", "NO"]),
                "cents": number * 7,
            }
            await client.publish("orders", json.dumps(order).encode(), key=f"customer-{number % 40}".encode())
        for partition in range(3):
            done = await client.end_offset("orders", partition=partition)
            await client.commit("orders", max(0, done - dice.randrange(50)), group="billing", partition=partition)
        await asyncio.sleep(0.2)


def pipeline(folder: Path) -> str:
    """Write the state of an execution, and return its checkpoint."""
    from headrace.spark.pipelines.executions import Execution
    from headrace.spark.pipelines.files import load
    from headrace.spark.pipelines.progress import QueryState

    os.environ["HEADRACE_PIPELINES"] = str(folder / "entries")
    made = load(Path(__file__).parents[2] / "examples/orders/pipeline.toml", checkpoint=str(folder / "checkpoint"))
    now = int(time.time() * 1000)
    execution = Execution(made.name, made.checkpoint, file="examples/orders/pipeline.toml", graph=made.graph(), now_ms=now)
    execution.__enter__()
    queries = [QueryState(name, "running", 42, 18_250, 412.0, 655.0, 780, 31, 12).plain() for name in made.sinks]
    execution.write("running", queries, now_ms=now, master="local[2]")
    return made.checkpoint


def shoot(broker: BrokerThread, console: ConsoleThread, target: Path, folder: Path) -> None:
    checkpoint = pipeline(folder)
    driver = chromium(folder / "profile")
    try:
        pages = Pages(driver, console)
        pages.open("/")
        for theme in ("light", "dark"):
            driver.add_cookie({"name": "headrace_theme", "value": theme})
            for label, width in WIDTHS.items():
                for name, path in PAGES.items():
                    size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": width < 500}
                    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
                    pages.open(path.replace("CHECKPOINT", checkpoint))
                    if "messages" in name:
                        pages.until(lambda: pages.all(".record"))
                    for summary in pages.all(".record > details > summary")[:1]:
                        summary.click()
                    height = driver.execute_script("return document.documentElement.scrollHeight")
                    found = driver.execute_script("return document.documentElement.scrollWidth")
                    if found > width:
                        print(f"{path}: {found} px at {width}")
                    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size | {"height": min(height, 2400)})
                    driver.save_screenshot(str(target / f"{name}-{label}-{theme}.png"))
        driver.add_cookie({"name": "headrace_theme", "value": "light"})
        for name, (path, height) in IMAGES.items():
            view: dict[str, object] = {"width": 1200, "height": height, "deviceScaleFactor": 0.75, "mobile": False}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", view)
            pages.open(path.replace("CHECKPOINT", checkpoint))
            driver.save_screenshot(str(target / f"{name}.png"))
    finally:
        driver.quit()


def main(target: Path, seconds: float = _TRAFFIC_SECONDS) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, running(Path(place)) as (broker, console):
        broker.with_client(prepare)
        sending = threading.Thread(target=lambda: broker.with_client(lambda client: traffic(client, seconds + 300)), daemon=True)
        sending.start()
        import urllib.request

        urllib.request.urlopen(console.url + "/").close()  # the samples begin with the first visit
        time.sleep(seconds)
        shoot(broker, console, target, Path(place))
    print(f"{len(PAGES) * 4} screenshots in {target}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(float, sys.argv[2:3]))
