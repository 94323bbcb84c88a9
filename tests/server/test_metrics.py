"""The text of the metrics says the same as that of the library's encoders."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_families
from prometheus_client.parser import text_string_to_metric_families as plain_families
from prometheus_client.registry import Collector

from headrace.server.metrics import rendered

HOSTILE = 'a"} 1\nforged{x="\\'
OPEN = "application/openmetrics-text; version=1.0.0"


class Families(Collector):
    def collect(self) -> Iterator[Metric]:
        yield InfoMetricFamily("headrace_build", "Version.", {"version": "1"})
        yield GaugeMetricFamily("headrace_one", "A back\\slash.\nTwo lines.", 3)
        gauges = GaugeMetricFamily("headrace_values", "Numbers.", labels=["topic", "at"])
        for number, value in enumerate((0, 0.1, 1e22, 12345678901234567, -1, math.inf, -math.inf, math.nan)):
            gauges.add_metric([HOSTILE, str(number)], value)
        yield gauges
        yield CounterMetricFamily("headrace_events", "Events.", 7)
        histograms = HistogramMetricFamily("headrace_seconds", "Durations.", labels=["protocol"])
        histograms.add_metric(["figg"], [("0.5", 1), ("+Inf", 3)], 4.25)
        yield histograms


@pytest.mark.parametrize("accept", ["", "text/plain;version=0.0.4", OPEN])
def test_a_parser_reads_the_same_from_it_as_from_the_text_of_the_library(accept: str) -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Families())
    encoder, content_type = choose_encoder(accept)
    parse = open_families if accept == OPEN else plain_families
    body, found_type = rendered(registry, accept)
    assert found_type == content_type
    ours, theirs = list(parse(body.decode())), list(parse(encoder(registry).decode()))
    assert [(one.name, one.type, one.documentation) for one in ours] == [(one.name, one.type, one.documentation) for one in theirs]
    for mine, yours in zip(ours, theirs, strict=True):
        assert [(one.name, one.labels) for one in mine.samples] == [(one.name, one.labels) for one in yours.samples]
        assert [str(float(one.value)) for one in mine.samples] == [str(float(one.value)) for one in yours.samples]
