"""One standalone cluster for all tests of it, which are in one xdist group."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.spark.cluster.standalone import Standalone


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("cluster") / "spark") as running:
        yield running
