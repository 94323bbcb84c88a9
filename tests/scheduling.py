"""Order and units of work of `pytest -n 4 --dist loadgroup`.

A worker gets tests in units and finishes one before it gets the next. Tests of one `xdist_group` are a unit, so that what they share (the
Spark session, Kafka, a browser) starts once and not in every worker. Each test below `ALONE` is a unit, because it takes long and
shares nothing. The tests of any other file are a unit, so that fixtures of a module are set up once.

The longest units come first, so that no worker ends alone with one of them.
"""

from __future__ import annotations

from typing import Any, Final

import pytest
from xdist.scheduler import LoadGroupScheduling  # type: ignore[import-untyped]  # xdist has no py.typed

LONGEST_FIRST: Final = ("spark", "kafka", "browser", "kill_loop", "crash_images", "slow")
"""Markers, in the order in which xdist hands out what has them. `make test-quick` leaves them out."""
FIRST_GROUPS: Final = ("spark", "kafka")
"""Groups that take a large part of the whole time in one worker."""
ALONE: Final = (
    *("tests/broker/test_crash", "tests/broker/test_stages_crash", "tests/consistency", "tests/crash", "tests/demo", "tests/faults"),
    *("tests/spark/cluster", "tests/spark/crash", "tests/spark/pipelines/test_processes", "tests/spark/test_session"),
    "tests/storage/crash",
)
"""Beginnings of the ids of tests that are units by themselves."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Act after the hooks that set markers, which are called first."""
    if hasattr(config, "workerinput"):
        items[:] = in_turns(items)
        for item in items:
            name_group(item)


def in_turns(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the items with the longest first; items of one kind keep their order, so that those of a module share its fixtures."""

    def turn(item: pytest.Item) -> int:
        if group(item) in FIRST_GROUPS:
            return FIRST_GROUPS.index(group(item)) - len(FIRST_GROUPS)
        return next((turn for turn, name in enumerate(LONGEST_FIRST) if item.get_closest_marker(name)), len(LONGEST_FIRST))

    return sorted(items, key=turn)


def group(item: pytest.Item) -> str:
    """Return the group of a test, or an empty string."""
    mark = item.get_closest_marker("xdist_group")
    return "" if mark is None else str(mark.args[0])


def name_group(item: Any) -> None:
    """Append the group to the id of a test, where the scheduler looks for it.

    xdist 3.8 does this by setting `_nodeid`, which pytest 9.2 no longer reads: without this function groups have no effect.
    """
    if (name := group(item)) and hasattr(item, "_id") and not item.nodeid.endswith(f"@{name}"):
        item._id = type(item._id).parse(f"{item.nodeid}@{name}")


class Units(LoadGroupScheduling):  # type: ignore[misc]  # its base is untyped
    """Hand out groups, files and single tests, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return scope if scope != nodeid or nodeid.startswith(ALONE) else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Units | None:
    if config.getvalue("dist") != "loadgroup":
        return None
    config.option.loadscopereorder = False  # the number of tests in a unit says nothing about its time
    return Units(config, log)
