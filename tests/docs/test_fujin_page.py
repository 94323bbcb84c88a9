"""The Fujin page is correct: sessions reply as its examples show, its names exist, its limits match the code."""

from __future__ import annotations

import re
from pathlib import Path

from headrace import limits
from headrace.server.config import SETTINGS
from headrace.sessions.fujin.settings import FujinSettings
from tests.net.polling import until
from tests.sessions.fujin.support import StreamLink, fujin_protocol

PAGE = (Path(__file__).parent.parent.parent / "docs" / "protocols" / "fujin.md").read_text(encoding="utf-8")
DIALOGUES = [block.splitlines() for block in re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL)]
LINE = re.compile(r"([<>]) ((?:[0-9a-f]{2}(?:[0-9a-f]{2})* ?)+)(?: +\S.*)?")


def frames(line: str) -> tuple[str, bytes]:
    found = LINE.fullmatch(line)
    assert found is not None, line
    return found[1], bytes.fromhex(found[2])


async def test_sessions_reply_as_the_page_shows() -> None:
    assert len(DIALOGUES) == 3
    async with fujin_protocol() as protocol:
        for dialogue in DIALOGUES:
            peer = protocol.peer()
            position = 0
            for direction, said in map(frames, dialogue):
                if direction == ">":
                    peer.say(said)
                    continue
                await _answered(peer.link, position + len(said))
                assert bytes(peer.link.sent[position : position + len(said)]) == said
                position += len(said)
            assert peer.link.closed == ("disconnected", False)
            assert len(peer.link.sent) == position, "nothing is said beyond the page"


async def _answered(link: StreamLink, size: int) -> None:
    await until(lambda: len(link.sent) >= size)


def test_every_setting_named_on_the_page_exists() -> None:
    named = set(re.findall(r"`((?:fujin|tls)\.[a-z_]+)", PAGE))
    assert named and named <= set(SETTINGS)


def test_the_numbers_on_the_page_are_those_of_the_code() -> None:
    settings = FujinSettings()
    assert limits.FUJIN_MESSAGE_BYTES_MAX == limits.MIB and limits.FUJIN_NAME_BYTES_MAX == limits.KIB
    assert limits.QUIC_STREAM_WINDOW_BYTES == limits.MIB and limits.OUTPUT_HIGH_WATER_BYTES == 256 * limits.KIB
    assert (limits.QUIC_PING_SECONDS, limits.QUIC_PONG_SECONDS_MAX, limits.IDLE_SECONDS_MAX) == (5, 5, 30)
    assert (limits.FUJIN_IDS_MAX, limits.FUJIN_ID_BYTES_MAX, limits.QUIC_STREAMS_MAX) == (65_536, 1_024, 1_000)
    assert (settings.fetch_wait_ms, settings.ack_timeout_ms, settings.backoff_ms, settings.attempts_max) == (500, 30_000, 1_000, 5)
    assert (settings.transaction_timeout_ms, settings.stop_seconds, settings.doubt_seconds) == (60_000, 5, 0.05)
