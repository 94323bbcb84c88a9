from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.engine.subjects import SUBJECTS, Clock, Subject


@pytest.fixture(params=list(SUBJECTS))
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    """Each engine in turn, open, on an empty directory and with a manual clock."""
    clock = Clock()
    subject = Subject(SUBJECTS[request.param](tmp_path, clock), clock)
    await subject.engine.open()
    yield subject
    await subject.engine.close()
