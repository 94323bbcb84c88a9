"""The README matches the package: commands, options, versions, protocols and words."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from headrace.cli.reference import commands
from headrace.server.config import QUIC_PROTOCOLS, TCP_PROTOCOLS
from headrace.server.config_sources import resolve

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_every_protocol_has_a_row_with_its_page_and_its_upstream_project() -> None:
    rows = dict(
        re.findall(r"^\| \[[\w ]+\]\(docs/protocols/(\w+)\.md\) \| \[[\w/.-]+\]\((https://github\.com/[\w/.-]+)\) \|", README, re.MULTILINE)
    )
    assert set(rows) == {*TCP_PROTOCOLS, *QUIC_PROTOCOLS}
    assert len(set(rows.values())) == len(rows)


def test_the_supported_pythons_are_those_of_the_package() -> None:
    [listed] = re.findall(r"Python (3\.\d+(?:, 3\.\d+)* or 3\.\d+)", README)
    classified = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", text)]
    assert re.findall(r"3\.\d+", listed) == classified
    assert PROJECT["requires-python"] == f">={classified[0]}"


def test_the_extras_of_the_install_line_exist() -> None:
    for listed in re.findall(r"pip install '\.\[([\w,]+)\]'", README):
        assert set(listed.split(",")) <= set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("line", re.findall(r"`(headrace [a-z][^`]*)`", README))
def test_every_command_that_reproduces_a_figure_exists(line: str) -> None:
    known = {path: {flag for parameter in command.params for flag in parameter.opts} for path, command in commands()}
    words = line.split()
    path = next((" ".join(words[:length]) for length in (3, 2) if " ".join(words[:length]) in known), None)
    assert path is not None, line
    assert {word for word in words if word.startswith("-")} <= known[path], line


def test_the_ports_of_the_table_are_the_defaults() -> None:
    listen = resolve(file=None, environment={}, flags={}).config.listen
    for bind in (*listen.tcp, *listen.flight):
        assert str(bind.address.port) in README


def test_missing_features_are_named() -> None:
    assert "no replication" in README
    assert "served by one that Kafka elects" in README and "Not yet: the work of groups divided over several brokers" in README


@pytest.mark.parametrize("word", ["door", "lane", "station", "house", "story", "wheel at", "reckon"])
def test_the_words_are_those_of_the_field(word: str) -> None:
    prose = re.sub(r"`[^`]*`", "", README)
    assert not re.search(rf"\b{word}s?\b", prose, re.IGNORECASE)
