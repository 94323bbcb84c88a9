"""Invalid frames, the time of the error, and frames that are ignored."""

from __future__ import annotations

import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import WireError
from headrace.limits import FIGG_TOPIC_BYTES_MAX, FRAME_BYTES_DEFAULT_MAX
from headrace.wire.figg import Attach, Ping, PublishBatch, client_decoder, encode, server_decoder
from tests.conftest import Proof
from tests.wire.figg import streams
from tests.wire.figg.streams import cut, flat_messages, mutate


def frame(kind: int, payload: bytes, *, version: int = 1, size: int | None = None) -> bytes:
    return struct.pack(">HHI", kind, version, len(payload) if size is None else size) + payload


FOO = bytes.fromhex("00000003 666f6f")
MALFORMED = {
    "ping of seven bytes": frame(8, bytes(7)),
    "ping of nine bytes": frame(8, bytes(9)),
    "ping without a payload": frame(8, b""),
    "attach without a payload": frame(1, b""),
    "attach without an offset": frame(1, b"\0\0" + FOO),
    "attach with a byte too many": frame(1, b"\0\0" + FOO + bytes(9)),
    "attach whose topic reaches beyond": frame(1, b"\0\0" + bytes.fromhex("00000004 666f6f") + bytes(8)),
    "attach whose topic claims four gigabytes": frame(1, b"\0\0" + bytes.fromhex("ffffffff 666f6f") + bytes(8)),
    "detach whose topic is short": frame(3, bytes.fromhex("00000002 666f6f")),
    "detach of two bytes": frame(3, b"\0\0"),
    "detach with a long topic": frame(3, struct.pack(">I", FIGG_TOPIC_BYTES_MAX + 1) + bytes(FIGG_TOPIC_BYTES_MAX + 1)),
    "publish without a payload": frame(5, b""),
    "publish of one byte": frame(5, b"\0"),
    "publish without data": frame(5, FOO + bytes(8)),
    "publish whose topic reaches beyond": frame(5, bytes.fromhex("00000063 666f6f") + bytes(20)),
    "publish whose data is short": frame(5, FOO + bytes(8) + struct.pack(">I", 2) + b"bar"),
    "publish whose data reaches beyond": frame(5, FOO + bytes(8) + struct.pack(">I", 4) + b"bar"),
    "publish with a long topic": encode.publish("x" * (FIGG_TOPIC_BYTES_MAX + 1), [1], [b"v"]),
    "topic that is not UTF-8": frame(5, bytes.fromhex("00000003 ff6f6f") + bytes(8) + struct.pack(">I", 0)),
    "frame above the limit": frame(5, b"", size=FRAME_BYTES_DEFAULT_MAX + 1),
    "unknown frame above the limit": frame(77, b"", size=FRAME_BYTES_DEFAULT_MAX + 1),
    "version zero": frame(8, bytes(8), version=0),
    "version seven": frame(8, bytes(8), version=7),
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
}


@pytest.mark.parametrize("stream", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_input_is_refused_after_the_good_messages_before_it(stream: bytes) -> None:
    good = streams.PING_12345 + streams.PUBLISH_FOO_0_BAR
    for chunks in ([good + stream + streams.PING_12345], cut(good + stream + streams.PING_12345, 1)):
        found = flat_messages(server_decoder(), chunks)
        assert [entry[0] for entry in found] == ["Ping(timestamp=12345)", "PublishBatch", "refused"]


@pytest.mark.parametrize("stream", MALFORMED.values(), ids=MALFORMED.keys())
def test_the_reason_puts_its_numbers_behind_a_colon(stream: bytes) -> None:
    """Reasons are counted by the part before the colon, so a peer must not be able to make new ones."""
    (_, reason) = flat_messages(server_decoder(), [stream])[-1]
    kind = str(reason).split(":")[0]
    assert kind in {"malformed frame", "unknown version", "frame too large", "topic too long", "topic is not UTF-8"}


@pytest.mark.parametrize("kind, payload", [(2, FOO), (4, FOO[:-1]), (6, bytes(7)), (7, FOO + bytes(8)), (9, b"")])
def test_a_client_refuses_malformed_answers(kind: int, payload: bytes) -> None:
    assert flat_messages(client_decoder(), [frame(kind, payload)])[-1][0] == "refused"


def test_an_error_is_final() -> None:
    decoder = server_decoder()
    with pytest.raises(WireError, match="version"):
        list(decoder.feed(frame(8, bytes(8), version=2)))
    with pytest.raises(WireError, match="version"):
        list(decoder.feed(streams.PING_12345))


def test_a_bad_frame_inside_a_batch_comes_after_the_batch() -> None:
    good = encode.publish("foo", range(150), [b"bar"] * 150)
    found = flat_messages(server_decoder(), [good + MALFORMED["publish whose data is short"]])
    assert len(found) == 151 and found[-1][0] == "refused"


def test_other_versions_pass_when_told_so() -> None:
    stream = frame(8, bytes(8), version=7) + encode.publish("t", [1], [b"a"]).replace(b"\0\5\0\1", b"\0\5\0\7")
    assert list(server_decoder(strict_version=False).feed(stream)) == [Ping(0), PublishBatch("t", [1], [b"a"])]


def test_the_frame_limit_is_inclusive() -> None:
    at_limit = encode.publish("t", [1], [bytes(100 - 17)])
    assert len(at_limit) == 8 + 100
    for chunks in ([at_limit], cut(at_limit, 1), [at_limit * 3]):
        assert flat_messages(server_decoder(frame_bytes_max=100), chunks)[-1][0] == "PublishBatch"
    above = encode.publish("t", [1], [bytes(100 - 16)])
    for chunks in ([above], cut(above, 1), [at_limit + above], [above[:8]]):
        assert flat_messages(server_decoder(frame_bytes_max=100), chunks)[-1][0] == "refused"


def test_a_frame_above_the_limit_is_refused_with_its_header_and_nothing_is_held() -> None:
    decoder = server_decoder()
    with pytest.raises(WireError, match="too large"):
        list(decoder.feed(frame(5, b"", size=FRAME_BYTES_DEFAULT_MAX + 1)))
    assert decoder.held_bytes == 0


def test_a_ping_that_claims_megabytes_is_refused_with_its_header() -> None:
    with pytest.raises(WireError, match="PING"):
        list(server_decoder().feed(frame(8, b"", size=1 << 20)))


def test_the_topic_limit_is_inclusive() -> None:
    name = "x" * FIGG_TOPIC_BYTES_MAX
    assert list(server_decoder().feed(encode.attach(name))) == [Attach(name, None)]
    assert list(server_decoder().feed(encode.publish(name, [1], [b"v"]))) == [PublishBatch(name, [1], [b"v"])]


def test_frames_of_unknown_types_are_skipped_without_being_held() -> None:
    decoder = server_decoder()
    assert list(decoder.feed(frame(500, b"x" * 1_000)[:600])) == []
    assert decoder.held_bytes == 0
    assert list(decoder.feed(b"x" * 408 + streams.PING_12345)) == [Ping(12345)]


def test_ten_thousand_mutated_streams_decode_alike_however_they_are_cut(proof: Proof) -> None:
    """Nothing but `WireError` ever escapes, and the cuts never change what is understood."""
    chance = random.Random(20_26)
    to_server = b"".join(frame for name, frame in vars(streams).items() if name.isupper())
    to_server += encode.publish("foo", range(110), [b"v"] * 110) + encode.data("foo", range(70), [b"v"] * 70)
    refused = 0
    for _ in range(10_000):
        begin = chance.randrange(len(to_server) - 300)
        stream = mutate(to_server[begin if chance.random() < 0.2 else 0 : begin + 300], chance)
        server = chance.random() < 0.5
        whole = flat_messages(server_decoder() if server else client_decoder(), [stream])
        chunks = cut(stream, chance.randrange(1, 40))
        assert whole == flat_messages(server_decoder() if server else client_decoder(), chunks)
        refused += whole[-1:] != [] and whole[-1][0] == "refused"
    assert 1_000 < refused < 10_000, "the mutations should neither all pass nor all fail"
    proof("mutated Figg streams", 10_000)


@given(st.binary(max_size=200), st.integers(1, 50))
@settings(max_examples=300)
def test_noise_never_raises_anything_but_a_wire_error(noise: bytes, size: int) -> None:
    assert flat_messages(server_decoder(), [noise]) == flat_messages(server_decoder(), cut(noise, size))
    assert flat_messages(client_decoder(strict_version=False), [noise]) == flat_messages(
        client_decoder(strict_version=False), cut(noise, size)
    )
