"""One broker and one console per module, with open and with enforced access."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.console.harness import ADMIN_PASSWORD, BrokerThread, Browser, ConsoleThread, running


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerThread, ConsoleThread]]:
    with running(tmp_path_factory.mktemp("open")) as made:
        yield made


@pytest.fixture(scope="module")
def broker(opened: tuple[BrokerThread, ConsoleThread]) -> BrokerThread:
    return opened[0]


@pytest.fixture
def browser(opened: tuple[BrokerThread, ConsoleThread]) -> Browser:
    return Browser(opened[1].port)


@pytest.fixture(scope="module")
def enforced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerThread, ConsoleThread]]:
    with running(tmp_path_factory.mktemp("enforced"), is_enforced=True) as made:
        yield made


@pytest.fixture
def admin(enforced: tuple[BrokerThread, ConsoleThread]) -> Browser:
    browser = Browser(enforced[1].port)
    assert browser.log_in("admin", ADMIN_PASSWORD).status == 200
    return browser


@pytest.fixture(autouse=True)
def no_pipelines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the pipelines of the machine."""
    monkeypatch.setenv("HEADRACE_PIPELINES", str(tmp_path / "pipelines"))
