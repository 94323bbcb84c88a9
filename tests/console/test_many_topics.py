"""The list of topics of a broker with ten thousand of them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from headrace.clients.connect import Address
from tests.cli.shell import Shell, shell_of_a_broker
from tests.console.harness import Browser, ConsoleThread
from tests.sessions.flymq.support import DEV

COUNT = 9_900
"""The broker allows 10,000 partitions, its own tables included."""


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with shell_of_a_broker() as made:

        async def create() -> None:
            for number in range(COUNT):
                await made.broker.create_topic(DEV, f"many-{number:05}", partitions=1)

        made.do(create())
        yield made


@pytest.fixture(scope="module")
def console(shell: Shell) -> Iterator[ConsoleThread]:
    made = ConsoleThread(Address("flymq", "127.0.0.1", shell.server.port))
    yield made
    made.close()


def test_the_list_shows_one_page_of_them(console: ConsoleThread) -> None:
    page = Browser(console.port).get("/topics", page=3)
    assert f"{COUNT:,} topics, page 3 of 99" in page.words and "many-00200" in page.text and "many-00300" not in page.text
    assert len(page.body) < 100_000


def test_the_list_takes_less_than_a_second_of_processor_time(console: ConsoleThread) -> None:
    browser = Browser(console.port)
    browser.get("/topics")
    spent = time.process_time()
    assert "many-09899" in browser.get("/topics", sort="-name").text
    # Broker, console and this test together: a busy machine changes processor time little.
    assert time.process_time() - spent < 1.0


def test_filtering_while_one_types_does_not_ask_the_broker_each_time(console: ConsoleThread, shell: Shell) -> None:
    browser = Browser(console.port)
    browser.get("/topics")
    spent = time.process_time()
    for end in range(1, 6):
        part = browser.get("/topics", q="many-09899"[: 5 + end], part=1)
    assert "many-09899" in part.text and "<html" not in part.text
    assert time.process_time() - spent < 1.0
