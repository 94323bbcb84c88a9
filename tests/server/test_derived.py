"""Settings of the layers follow the configuration."""

from __future__ import annotations

import pytest

from headrace.server.config_sources import resolve
from headrace.server.derived import broker_settings


@pytest.mark.parametrize(
    ("memory", "publication_mib"),
    [
        ("64 MiB", 256),
        ("160 MiB", 256),
        ("344 MiB", 258),  # three quarters, below which nothing is spilled
        ("640 MiB", 480),
        ("64 GiB", 512),  # a publication must fit into a frame of the journal
    ],
)
def test_a_publication_that_is_not_spilled_is_one_append(memory: str, publication_mib: int) -> None:
    settings = broker_settings(resolve(environment={"HEADRACE__LIMITS__STAGED_MEMORY": memory}).config)
    assert settings.publication_bytes == publication_mib << 20


def test_staged_records_have_160_mib_unless_configured() -> None:
    assert broker_settings(resolve().config).stages_memory_bytes == 160 << 20
    configured = resolve(environment={"HEADRACE__LIMITS__STAGED_MEMORY": "1 GiB"}).config
    assert broker_settings(configured).stages_memory_bytes == 1 << 30
