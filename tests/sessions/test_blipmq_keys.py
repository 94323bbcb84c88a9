from __future__ import annotations

from headrace.broker.access import Principal
from headrace.sessions.blipmq_keys import api_keys


def test_a_key_is_known_by_all_of_its_bytes() -> None:
    verify = api_keys({"dev-key": "dev", "clé": "ops"})
    assert verify(b"dev-key") == Principal("dev", "blipmq")
    assert verify("clé".encode()) == Principal("ops", "blipmq")
    for wrong in (b"", b"dev-ke", b"dev-key ", b"DEV-KEY", b"dev-key\0", b"x" * 65_535):
        assert verify(wrong) is None


def test_without_keys_nobody_gets_in() -> None:
    assert api_keys({})(b"") is None
    assert api_keys({})(b"any") is None


def test_no_key_is_kept_in_the_clear() -> None:
    verify = api_keys({"a-secret-key": "dev"})
    held = [cell.cell_contents for cell in verify.__closure__ or ()]
    assert held
    assert "a-secret-key" not in repr(held)
