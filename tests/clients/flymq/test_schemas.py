"""Schemas through the FlyMQ client, over a socket."""

from __future__ import annotations

import pytest

from headrace.clients.errors import Refused
from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import IncompatibleSchema, InvalidRecord, UnknownSchema
from tests.clients.flymq.support import serving

INT, NUM = b'{"type":"integer"}', b'{"type":"number"}'


async def test_a_schema_from_its_registration_to_its_end() -> None:
    async with serving() as server, await FlyMqClient.connect("127.0.0.1", server.port) as client:
        assert await client.register_schema("n", "json", INT) == 1
        found = await client.schema("n")
        assert (found.name, found.type, found.version, found.definition, found.compatibility) == ("n", "json", 1, INT, "backward")
        with pytest.raises(IncompatibleSchema):
            await client.register_schema("n", "json", b'{"type":"string"}')
        assert await client.register_schema("n", "json", NUM) == 2
        assert [(one.name, one.version) for one in await client.schemas()] == [("n", 1), ("n", 2)]
        assert await client.validate("n", b"1") == []
        assert await client.validate("n", b'"x"') == ['/: "x" is not of type "number"']
        await client.delete_schema("n", 1)
        await client.delete_schema("n")
        with pytest.raises(UnknownSchema):
            await client.schema("n")
        with pytest.raises(Refused, match="unsupported schema type: xml"):
            await client.register_schema("n", "xml", b"<a/>")


async def test_records_are_held_to_a_schema() -> None:
    async with serving() as server, await FlyMqClient.connect("127.0.0.1", server.port) as client:
        await client.register_schema("n", "json", INT)
        receipt = await client.publish_with_schema("t", b"1", schema="n", key=b"k")
        assert (receipt.partition, receipt.offset) == (0, 0)
        with pytest.raises(InvalidRecord):
            await client.publish_with_schema("t", b"x", schema="n")
        with pytest.raises(UnknownSchema):
            await client.publish_with_schema("t", b"x", schema="none")
        await client.publish("t", b"x")
        await client.require_schema("t", "n")
        with pytest.raises(InvalidRecord):
            await client.publish("t", b"x")
        await client.release_schema("t")
        await client.publish("t", b"x")
