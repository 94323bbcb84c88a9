"""Topic names on the command line: patterns, and suggestions for a name that does not exist."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final

import click

from headrace.clients.api import Client
from headrace.clients.errors import NotSupported
from headrace.errors import BrokerError, HeadraceError, UnknownTopic

_DEAD_LETTERS: Final = ".dlq"
_NUMBERS: Final = re.compile(r"\d+")


@asynccontextmanager
async def suggesting(client: Client) -> AsyncIterator[None]:
    """Add the nearest existing name to the error of an unknown topic."""
    try:
        yield
    except UnknownTopic as failure:
        nearest = await nearest_topic(client, failure.topic)
        if not nearest:
            raise
        raise click.ClickException(f"{failure}; did you mean {nearest}?") from failure


async def nearest_topic(client: Client, name: str) -> str:
    """Return the existing topic with the most similar name; empty if there is none."""
    try:
        known = await client.topics()
    except HeadraceError:
        return ""  # the protocol cannot list topics, or the user may not: there is no suggestion
    # Names that differ only in their number, such as load-7 and load-8, are rarely typos of one another.
    others = [other for other in known if _NUMBERS.sub("", other) != _NUMBERS.sub("", name)]
    found = difflib.get_close_matches(name, others, n=1, cutoff=0.7)
    return found[0] if found else ""


def is_pattern(name: str) -> bool:
    return any(char in name for char in "*?[")


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that the pattern matches; dead letters only if the pattern asks for them."""
    found = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    return found if pattern.endswith(_DEAD_LETTERS) else [name for name in found if not name.endswith(_DEAD_LETTERS)]


async def chosen_topics(client: Client, name: str) -> list[str]:
    """Return the topics that a name or a pattern such as `orders.*` means. Raises `UnknownTopic` if a pattern matches none."""
    if not is_pattern(name):
        return [name]
    try:
        known = await client.topics()
    except NotSupported as failure:
        raise click.UsageError(f"patterns need the list of topics: {failure}") from None
    if name in known:
        return [name]
    found = matching(name, known)
    if not found:
        raise click.ClickException(f"no topic matches {name!r}; headrace topic list shows the topics") from UnknownTopic(name)
    return sorted(found)


async def is_new(client: Client, topic: str) -> bool:
    """Return whether publishing creates the topic, as far as this user can see."""
    describe = getattr(client, "describe_topic", None)
    if describe is None:
        return False
    try:
        await describe(topic)
    except UnknownTopic:
        return True
    except BrokerError:
        pass  # publishing reports it
    return False
