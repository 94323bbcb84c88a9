"""Overview: the broker, its figures of the last hour, and what needs attention."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

from starlette.responses import Response

from headrace.clients.flymq.client import FlyMqClient
from headrace.console.charts import line_chart
from headrace.console.connection import status_of
from headrace.console.samples import Samples
from headrace.console.text import number
from headrace.console.visits import Visit, event_of
from headrace.errors import Unavailable

LIVE_SECONDS: Final = 2.0
_LAG_GROWS_SECONDS: Final = 300.0
_SHOWN_MAX: Final = 10


class Warning(NamedTuple):
    """Something that needs attention, and what to do."""

    text: str
    advice: str
    path: str = ""
    query: dict[str, str] = {}  # noqa: RUF012  # never changed


def warnings_of(status: dict[str, Any], samples: Samples) -> list[Warning]:
    """Return what needs attention, the most urgent first."""
    found: list[Warning] = []
    # Those about dead letters are below, each with its topic.
    found += [Warning(_begun(one["text"]), _begun(one["advice"]) + ".") for one in status["warnings"] if one["name"] != "dead_letters"]
    for row in sorted(status["dead_letters"], key=lambda row: -row["waiting"])[:_SHOWN_MAX]:
        text = f"{row['waiting']:,} dead letter{'' if row['waiting'] == 1 else 's'} of {row['topic']}"
        found.append(Warning(text, "Look at their reasons, then replay or purge them.", "/dead-letters/of", {"topic": row["topic"]}))
    before = {(row["group"], row["topic"]): row["lag"] for row in _earlier(samples)}
    for row in status["groups"]:
        old = before.get((row["group"], row["topic"]))
        if old is not None and row["lag"] > max(2 * old, old + 1_000):
            text = f"The lag of {row['group']} on {row['topic']} grew from {old:,} to {row['lag']:,} in 5 minutes"
            found.append(Warning(text, "Look whether its members run and commit; add members.", "/group", {"name": row["group"]}))
    return found


def _begun(text: str) -> str:
    """Return the text with a capital letter, as a sentence begins."""
    return text[:1].upper() + text[1:]


def _earlier(samples: Samples) -> list[dict[str, Any]]:
    limit = time.time() - _LAG_GROWS_SECONDS
    for sample in reversed(samples.ring):
        if sample is not None and sample.at <= limit:
            rows: list[dict[str, Any]] = sample.status["groups"]
            return rows
    return []


def charts_of(samples: Samples) -> list[object]:
    """Return the charts of the last hour."""
    now = time.time()

    def chart(points: list[tuple[float, float | None]], title: str, unit: str = "") -> object:
        return line_chart(points, title, span_seconds=samples.span_seconds, now=now, unit=unit)

    charts = [
        chart(samples.rate("published_records"), "Published", " records/s"),
        chart(samples.rate("delivered_records"), "Delivered", " records/s"),
        chart(_in_kib(samples.rate("published_bytes")), "In", " KiB/s"),
        chart(_in_kib(samples.rate("delivered_bytes")), "Out", " KiB/s"),
    ]
    charts.append(chart(samples.series(lambda sample: sample.lag), "Lag of all groups", " records"))
    charts.append(chart(samples.series(lambda sample: sample.dead_letters), "Dead letters"))
    last = next((sample for sample in reversed(samples.ring) if sample is not None), None)
    if last is not None and last.status["server"]:
        charts.append(chart(samples.series(lambda one: ((one.status["server"] or {}).get("connections") or {}).get("open")), "Connections"))
        free = samples.series(lambda one: _free_gib(one.status["server"]))
        charts.append(chart(free, "Disk free", " GiB"))
    return charts


def _free_gib(server: dict[str, Any] | None) -> float | None:
    disk = (server or {}).get("disk")
    return None if not disk else disk["free_bytes"] / (1 << 30)


def _in_kib(points: list[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    return [(at, None if rate is None else rate / 1024) for at, rate in points]


def _facts(visit: Visit, status: dict[str, Any]) -> dict[str, Any]:
    samples = visit.login.account.samples
    groups = sorted(status["groups"], key=lambda row: -row["lag"])[:_SHOWN_MAX]
    return {
        "status": status,
        "warnings": warnings_of(status, samples),
        "charts": charts_of(samples),
        "minutes": round(samples.span_seconds / 60),
        "groups": groups,
        "command": visit.command("status"),
        "number": number,
    }


async def overview(visit: Visit) -> Response:
    status = await status_of(visit.client)
    if not visit.login.account.samples.ring:
        await visit.login.account.samples.take()
    return visit.show("overview.html", **_facts(visit, status))


async def live(visit: Visit) -> Response:
    """Send the overview again every two seconds."""

    async def events(client: FlyMqClient) -> AsyncIterator[str]:
        while True:
            yield event_of("replace", visit.part("_overview.html", **_facts(visit, await status_of(client))))
            await asyncio.sleep(LIVE_SECONDS)
            if not client.is_connected:
                raise Unavailable("the broker does not answer; the page continues by itself as soon as it is back")

    return visit.stream(events)
