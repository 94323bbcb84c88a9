"""The page about the Flight endpoint is correct: its examples run in order and print the shown output."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headrace import limits
from headrace.flight import request
from headrace.limits import MIB
from tests.server.process import BrokerProcess

PAGE = (Path(__file__).parent.parent.parent / "docs" / "flight.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


def test_every_example_prints_the_output_on_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(EXAMPLES) == PAGE.count("```python") == 8
    with BrokerProcess(tmp_path, "--listen-flight", "127.0.0.1:0") as broker:
        protocols = broker.ready["protocols"]
        assert isinstance(protocols, dict)
        names: dict[str, object] = {}
        for example, wanted in EXAMPLES:
            exec(compile(example.replace("127.0.0.1:8815", protocols["flight"][0]), "docs/flight.md", "exec"), names)
            assert capsys.readouterr().out == wanted, example


def test_every_action_and_every_column_is_on_the_page() -> None:
    for name in (*request.ACTIONS, *request.ALL):
        assert f"`{name}`" in PAGE, name


def test_the_numbers_of_the_page_are_the_limits() -> None:
    assert limits.FLIGHT_READ_AHEAD_BYTES == 4 * MIB
    assert limits.FLIGHT_IN_FLIGHT_BYTES_MAX == 16 * MIB
    assert (limits.FLIGHT_CALLS_MAX, limits.FLIGHT_WAITS_MAX) == (128, 96)
    assert limits.FLIGHT_BATCH_BYTES_TARGET == 16 * MIB
    assert limits.FLIGHT_TOKEN_SECONDS_MAX == 3_600
    assert request.Range("t").rows_max == 65_536
    assert limits.LOCATED_BYTES_MAX == 32 * MIB
