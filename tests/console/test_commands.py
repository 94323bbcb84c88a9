"""Each command that a page shows is one that the command line accepts, with valid options."""

from __future__ import annotations

import json
import shlex

import click
import pytest

from headrace.cli import cli
from headrace.clients.flymq.client import FlyMqClient
from tests.console.harness import BrokerThread, Browser
from tests.console.test_browser import PATHS


def parse(line: str) -> None:
    """Parse a command line without running it. Raises `click.ClickException`."""
    words = shlex.split(line)
    assert words.pop(0) == "headrace"
    command: click.Command = cli
    context = click.Context(cli, info_name="headrace", **cli.context_settings)
    while isinstance(command, click.Group):
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"{line}: there is no command {name}"
        command = found
    # Files of examples do not exist, and a missing file is not a wrong option.
    types = {parameter: parameter.type for parameter in command.params if isinstance(parameter.type, (click.File, click.Path))}
    try:
        for parameter in types:
            parameter.type = click.STRING
        command.make_context(command.name or "", words, parent=context, resilient_parsing=False)
    finally:
        for parameter, type in types.items():
            parameter.type = type


@pytest.fixture(scope="module")
def prepared(broker: BrokerThread) -> BrokerThread:
    async def work(client: FlyMqClient) -> None:
        await client.create_topic("orders", partitions=2)
        await client.create_topic("rejected")
        await client.register_schema("object", "json", b'{"type": "object"}')
        await client.require_schema("rejected", "object", on_invalid="dead_letter")
        for number in range(3):
            await client.publish("orders", json.dumps(number).encode(), partition=0)
            await client.publish("rejected", b"no object")
        await client.commit("orders", 1, group="billing")
        await client.release_schema("rejected")

    broker.with_client(work)
    return broker


@pytest.mark.parametrize(
    "path",
    [
        *PATHS,
        "/messages?topic=orders&start=earliest&partition=1",
        "/messages?topic=orders&start=offset&at_value=3",
        "/messages?topic=orders&start=time&at_value=2026-01-01T10:00",
        "/group/reset?name=billing&topic=orders&to=time&value=2026-01-01&partition=0",
        "/group/reset?name=billing&topic=orders&to=offset&value=0",
        "/audit?from=2026-01-01&to=2026-02-01&type=topic&by=ann&resource=x&result=denied&search=y",
        "/schemas/new?name=object",
        "/group/delete?name=billing",
        "/schema/delete?name=object",
        "/access/user?name=ann",
    ],
)
def test_a_page_shows_commands_that_exist(prepared: BrokerThread, browser: Browser, path: str) -> None:
    if path.startswith("/access/user"):
        prepared.with_client(lambda client: client.create_user("ann", "a long password", ["consumer"]))
    commands = browser.get(path).commands
    assert commands or "nowhere" in path or path in ("/audit/console",)
    for line in commands:
        parse(line)


def test_an_action_shows_a_command_that_exists(prepared: BrokerThread, browser: Browser) -> None:
    page = browser.get("/dead-letters/of", topic="rejected")
    actions: list[tuple[str, dict[str, object]]] = [
        ("/topics/new", {"name": "made", "partitions": "2", "retention_ms": "7d", "retention_bytes": "1GiB", "compress": "no"}),
        ("/topic/alter?name=made", {"ttl_ms": "1h", "dead_letter_expired": "yes"}),
        ("/publish", {"topic": "made", "value": "-x 'quoted'", "key": "k", "headers": "a: b", "encoding": "text", "key_encoding": "text"}),
        ("/publish", {"topic": "made", "value": "AAAA", "key": "k", "encoding": "base64", "key_encoding": "text", "partition": "0"}),
        ("/dead-letters/do", {"token": page.token, "topic": "rejected", "what": "replay", "id": ["0-0"]}),
        ("/dead-letters/do", {"token": page.token, "topic": "rejected", "what": "discard", "id": ["0-1"]}),
        ("/dead-letters/do", {"token": page.token, "topic": "rejected", "what": "purge-all"}),
        ("/access/user", {"token": page.token, "do": "create", "name": "bob", "role": "guest"}),
        ("/access/user", {"token": page.token, "do": "alter", "name": "bob", "enabled": "yes"}),
        ("/access/user", {"token": page.token, "do": "delete", "name": "bob", "confirm": "bob"}),
        ("/access/roles", {"do": "put", "name": "r", "grants": "read,describe@topic:a*", "description": "d"}),
        ("/access/rules", {"do": "add", "effect": "allow", "whom": "everybody", "action": ["read"], "kind": "topic", "resource": "a*"}),
        ("/topic/delete?name=made", {"confirm": "made"}),
    ]
    for path, fields in actions:
        reply = browser.post(path, fields)
        assert reply.status == 200, (path, reply.words)
        assert 'class="notice"' in reply.text, (path, reply.words)
        parse(reply.commands[0])
