"""The work of `headrace copy`: first topics and schemas, then records, then what depends on them."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from headrace.arrow import copying
from headrace.cli import one_line
from headrace.cli.copying_places import Broker, check_place, opened
from headrace.cli.rows import Row
from headrace.clients.errors import Refused
from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import BrokerError, ConfigError
from headrace.wire.flymq.access_messages import UserEntry

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from headrace.flight.client import FlightClient


def copied(source: str, target: str, topics: Sequence[str], from_flight: str, to_flight: str, *, verify: bool, quiet: bool) -> list[Row]:
    """Copy, and return one row for each topic."""
    check_place(source, must_exist=True, option="--from")
    check_place(target, must_exist=False, option="--to")
    with ExitStack() as stack:
        ends = stack.enter_context(opened(source, from_flight)), stack.enter_context(opened(target, to_flight))
        return asyncio.run(_Copy(*ends, topics, verify, quiet).run())


class _Copy:
    def __init__(self, source: Broker, target: Broker, topics: Sequence[str], verify: bool, quiet: bool) -> None:
        self._source, self._target, self._wanted, self._verify, self._quiet = source, target, topics, verify, quiet

    async def run(self) -> list[Row]:
        """Copy everything and return one row for each topic."""
        shapes = await self._source.call(self._shapes)
        await self._target.call(lambda client: _create_topics(client, shapes))
        await self._copy_schemas()
        committed = await self._source.call(_committed)
        reader, writer = await self._source.flight_client(), await self._target.flight_client()
        with reader, writer, _bar(self._quiet) as bar:
            # Flight blocks; the connections of the event loop are closed meanwhile.
            found = [self._copy_topic(reader, writer, name, committed, bar) for name in sorted(shapes)]
        offsets = {place: moved for _, moves in found for place, moved in moves.items()}
        await self._target.call(lambda client: _move_groups(client, offsets, self._say))
        await self._copy_requirements(shapes)
        await self._copy_access()
        return [row for row, _ in found]

    def _say(self, text: str) -> None:
        if not self._quiet:
            click.echo(one_line(text), err=True)

    async def _shapes(self, client: FlyMqClient) -> dict[str, Any]:
        shapes = {shape["name"]: shape for shape in await client.call("topic.list")}
        for name in self._wanted:
            if name not in shapes:
                raise ConfigError(f"--topic: {self._source.name} has no topic {name!r}")
        return {name: shape for name, shape in shapes.items() if not self._wanted or name in self._wanted}

    def _copy_topic(
        self, reader: FlightClient, writer: FlightClient, topic: str, committed: Mapping[tuple[str, str, int], int], bar: Bar
    ) -> tuple[Row, dict[tuple[str, str, int], int]]:
        """Copy and verify one topic. Returns its row, and the offsets of groups as the target numbers them."""
        places = _places(reader, topic)
        total = sum(place.bounds.end - place.bounds.first for place in places) * (2 if self._verify else 1)
        tick = partial(bar.advance, bar.add_task(one_line(topic), total=total))
        copied = sum(copying.copy(at, there, tick) for at, there in zip(places, _places(writer, topic), strict=True))
        moves: dict[tuple[str, str, int], int] = {}
        rows, digest, is_same = 0, hashlib.sha256(), True
        for at, there in zip(places, _places(writer, topic), strict=True):
            groups = {key: offset for key, offset in committed.items() if key[1:] == (topic, at.partition)}
            if not self._verify and not groups:
                continue
            found = copying.fingerprint(at, sorted(set(groups.values())), progress=tick)
            moved = copying.offsets_of_rows(there, sorted(set(found.offsets.values())))
            moves |= {key: moved[found.offsets[offset]] for key, offset in groups.items()}
            if self._verify:
                is_same &= copying.fingerprint(there) == copying.Fingerprint(found.rows, found.sha256, {})
            rows += found.rows
            digest.update(found.sha256.encode())
        verified = is_same if self._verify else None
        if not is_same:
            self._say(
                f"{topic}: the target differs from the source; was it written by others, or the source compacted since the first copy?"
            )
        row = {"topic": topic, "partitions": len(places), "copied": copied, "verified": verified}
        return {**row, "records": rows if self._verify else None, "sha256": digest.hexdigest()[:16] if self._verify else None}, moves

    async def _copy_schemas(self) -> None:
        async def read(client: FlyMqClient) -> list[Any]:
            return [await client.schema(one.name, one.version) for one in await client.schemas()]

        async def write(client: FlyMqClient) -> None:
            known = {(one.name, one.version) for one in await client.schemas()}
            for one in sorted(found, key=lambda one: (one.name, one.version)):
                if (one.name, one.version) not in known:
                    await client.register_schema(one.name, str(one.type), one.definition, compatibility=one.compatibility)

        found = await self._source.call(read)
        if found:
            await self._target.call(write)

    async def _copy_requirements(self, topics: Mapping[str, Any]) -> None:
        async def read(client: FlyMqClient) -> list[Any]:
            return [await client.call("schema.requirement", topic=topic) for topic in topics]

        async def write(client: FlyMqClient) -> None:
            for one in found:
                await client.require_schema(one["topic"], one["schema"], version=one["version"], on_invalid=one["on_invalid"])

        found = [one for one in await self._source.call(read) if one is not None]
        if found:
            await self._target.call(write)

    async def _copy_access(self) -> None:
        """Copy roles, rules and users. A user has no password at the target, so no login with one succeeds until it is set."""

        async def read(client: FlyMqClient) -> tuple[list[Any], list[Any], list[UserEntry], int]:
            roles, rules = await client.manage("role.list"), await client.manage("rule.list")
            return roles, rules, await client.list_users(), len(await client.manage("key.list"))

        async def write(client: FlyMqClient) -> list[str]:
            known = {role["name"] for role in await client.manage("role.list")}
            for role in roles:
                if role["name"] not in known:
                    await client.manage("role.put", **role)
            present = await client.manage("rule.list")
            for rule in rules:
                if rule not in present:
                    await client.manage("rule.add", **rule)
            names = {user.user for user in await client.list_users()}
            made = [user for user in users if user.user not in names]
            for user in made:
                await client.create_user(user.user, "", user.roles, enabled=user.enabled)
            return [user.user for user in made]

        try:
            roles, rules, users, keys = await self._source.call(read)
        except (BrokerError, Refused) as failure:
            self._say(f"users and rules are not copied: {failure}")
            return
        if made := await self._target.call(write):
            self._say(f"set the passwords of these users with headrace user password: {', '.join(made)}")
        if keys:
            self._say(f"{keys} API keys are not copied: create new ones with headrace key create")


def _places(client: FlightClient, topic: str) -> list[copying.Place]:
    found = client.describe([topic])[topic]
    return [copying.Place(client, topic, partition, bounds) for partition, bounds in enumerate(found.partitions)]


async def _create_topics(client: FlyMqClient, shapes: Mapping[str, Any]) -> None:
    known = {shape["name"]: shape for shape in await client.call("topic.list")}
    for name, shape in shapes.items():
        partitions = len(shape["partitions"])
        if name not in known:
            await client.call("topic.create", topic=name, partitions=partitions, config=shape["config"])
        elif len(known[name]["partitions"]) != partitions:
            raise ConfigError(
                f"topic {name!r} has {partitions} partitions at the source and {len(known[name]['partitions'])} at the target"
            )


async def _committed(client: FlyMqClient) -> dict[tuple[str, str, int], int]:
    """Return the committed offsets by group, topic and partition."""
    found = {}
    for group in await client.call("group.list"):
        for row in await client.call("group.lag", group=group):
            if row["committed"] is not None:
                found[group, row["topic"], row["partition"]] = row["committed"]
    return found


async def _move_groups(client: FlyMqClient, offsets: Mapping[tuple[str, str, int], int], say: Callable[[str], None]) -> None:
    moves: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    for (group, topic, partition), offset in offsets.items():
        moves[group, topic][partition] = offset
    for (group, topic), places in moves.items():
        try:
            await client.call("group.reset", group=group, topic=topic, offsets=places)
        except (BrokerError, Refused) as failure:
            say(f"group {group} in {topic} is not moved: {failure}")


@contextmanager
def _bar(quiet: bool) -> Iterator[Bar]:
    """Show a progress bar on a terminal; nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as bar:
        yield bar
