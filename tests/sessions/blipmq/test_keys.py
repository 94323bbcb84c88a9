from __future__ import annotations

from headrace.broker.authorizer import Principal
from headrace.sessions.blipmq.keys import api_keys
from headrace.wire.blipmq import Nack, encoder
from tests.sessions.blipmq.support import running_server


def test_a_key_is_known_by_all_of_its_bytes() -> None:
    verify = api_keys({"dev-key": "dev", "clé": "ops"})
    assert verify(b"dev-key") == Principal("dev", "blipmq")
    assert verify("clé".encode()) == Principal("ops", "blipmq")
    for wrong in (b"", b"dev-ke", b"dev-key ", b"DEV-KEY", b"dev-key\0", b"x" * 65_535):
        assert verify(wrong) is None


def test_without_keys_every_login_fails() -> None:
    assert api_keys({})(b"") is None
    assert api_keys({})(b"any") is None


def test_no_key_is_kept_in_the_clear() -> None:
    verify = api_keys({"a-secret-key": "dev"})
    held = [cell.cell_contents for cell in verify.__closure__ or ()]
    assert held
    assert "a-secret-key" not in repr(held)


async def test_what_was_read_ahead_is_not_handed_out_once_reading_is_denied() -> None:
    denied: set[str] = set()
    async with running_server(authorize=lambda who, action, resource: action.value not in denied) as server:
        reader, writer = await server.client(), await server.client()
        subscription = await reader.subscribe("t", qos=0)
        await writer.publish("t", b"1", b"2", b"3", qos=0)
        assert [value for _, _, value in await reader.poll(subscription)] == [b"1"]
        denied.add("read")
        server.broker.access_changed()
        (reply,) = await reader.exchange(encoder.polls(subscription, [7]))
        assert isinstance(reply, Nack) and reply.code == 401
