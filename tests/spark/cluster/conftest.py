"""A mark for tests that start a cluster: `pytest -m 'not cluster'` leaves them out."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cluster: starts a Spark standalone cluster, six processes of Java")
