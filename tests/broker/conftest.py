from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.broker.stand import Stand


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    stand = Stand()
    await stand.broker.open()
    yield stand
    stand.engine.error = None
    await stand.broker.close()
