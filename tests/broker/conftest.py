from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.broker.harness import Harness


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    harness = Harness()
    await harness.broker.open()
    yield harness
    harness.engine.error = None
    await harness.broker.close()
