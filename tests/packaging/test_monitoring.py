"""The Grafana dashboard and the alert rules use only metrics that the broker has, and every alert has its instructions."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # the library has no types

from headrace.broker.measuring import Readings
from headrace.broker.meters import Meters
from headrace.engine.contract import HealthState
from headrace.net.counters import NetCounters
from headrace.server.loop_lag import LoopLag
from headrace.server.metrics import Sources, registry
from headrace.storage.store import StoreCounters

ROOT = Path(__file__).parent.parent.parent
MONITORING = ROOT / "packaging" / "monitoring"
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",), "info": ("_info",)}
_NAME = re.compile(r"\b(?:headrace|process|kafka)_[a-z0-9_]+")
_SCRAPER = {"up"}
"""Metrics of Prometheus itself."""


def families() -> dict[str, str]:
    """Return the type of every metric of a broker with all its parts, by name."""
    engine: Any = SimpleNamespace(
        opened_store=SimpleNamespace(counters=StoreCounters(), staged_bytes=0), counters=SimpleNamespace(requests={}, errors={}), epoch=1
    )
    sources = Sources(
        read=lambda: Readings(HealthState.OK, 0),
        meters=Meters(lambda: 0.0),
        engine=engine,
        net=NetCounters(),
        connections_max=1,
        loop_lag=LoopLag(),
        disk=lambda: (1, 2),
        headroom_bytes=1,
        flight_calls=lambda: (0, 0, Counter()),
        kafka_names=True,
    )
    return {family.name: family.type for family in registry(sources).collect()}


def series() -> set[str]:
    return {name + suffix for name, kind in families().items() for suffix in SUFFIXES[kind]}


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((MONITORING / "alerts.yaml").read_text("utf-8"))
    return [rule for group in document["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((MONITORING / "grafana.json").read_text("utf-8"))["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def test_every_metric_of_an_alert_exists() -> None:
    known = series()
    for rule in rules():
        used = set(_NAME.findall(rule["expr"])) or _SCRAPER & set(re.findall(r"\w+", rule["expr"]))
        assert used, rule["alert"]
        assert used - known - _SCRAPER == set(), rule["alert"]


def test_every_metric_of_the_dashboard_exists() -> None:
    known = series()
    for panel in panels():
        for target in panel["targets"]:
            used = set(_NAME.findall(target["expr"]))
            assert used and used <= known, panel["title"]


def test_a_metric_that_does_not_exist_is_found() -> None:
    assert "headrace_published_records_total" in series()
    assert not {"headrace_published_records", "headrace_nothing_total"} & series()


def test_every_metric_has_a_conventional_name() -> None:
    for name, kind in families().items():
        assert re.fullmatch(r"(headrace|process|kafka)_[a-z0-9_]+", name), name
        assert not name.endswith(("_ms", "_kb", "_mb")), f"{name}: base units are seconds and bytes"
        assert kind in SUFFIXES, name


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: str(rule["alert"]))
def test_an_alert_says_what_happened_and_the_manual_says_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("critical", "warning", "info") and rule["annotations"]["summary"].endswith(".")
    assert f"| `{rule['alert']}` |" in (ROOT / "docs" / "operations.md").read_text("utf-8")


def test_the_dashboard_has_what_grafana_expects() -> None:
    dashboard = json.loads((MONITORING / "grafana.json").read_text("utf-8"))
    assert dashboard["uid"] and dashboard["title"] and dashboard["schemaVersion"] >= 36  # data sources are objects since then
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert all(variable["datasource"] == source for variable in variables.values() if variable["type"] == "query")
    every = dashboard["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    assert all(panel["gridPos"]["x"] >= 0 and panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in every)
    for panel in panels():
        assert panel["type"] in {"timeseries", "stat"} and panel["datasource"] == source, panel["title"]
        assert set(panel["fieldConfig"]) == {"defaults", "overrides"}, panel["title"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]), panel["title"]
        for target in panel["targets"]:
            used = set(re.findall(r"\$(?!__)\{?(\w+)", target["expr"] + target.get("legendFormat", "")))
            assert used <= set(variables), panel["title"]
            assert target["expr"].count("(") == target["expr"].count(")") and target["expr"].count("{") == target["expr"].count("}")


def test_the_panels_do_not_overlap() -> None:
    places: set[tuple[int, int]] = set()
    for panel in json.loads((MONITORING / "grafana.json").read_text("utf-8"))["panels"]:
        box = panel["gridPos"]
        cells = {(x, y) for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])}
        assert not cells & places, panel["title"]
        places |= cells
