"""Invalid input gets its documented error, in its dialect, and later requests are answered normally."""

from __future__ import annotations

import pytest

from headrace.wire.rustlog import Received, Refused, ReplyDecoder, RequestDecoder, encode_reply
from headrace.wire.rustlog import errors as errors
from headrace.wire.rustlog import messages as m
from headrace.wire.rustlog.messages import Dialect, Undecodable
from tests.wire.rustlog.vectors import BINARY, JSON, framed

PRODUCE = '{"Produce":{"topic":"t","partition":0,"records":%s}}'
FETCH = '{"Fetch":{"topic":"t","partition":0,"offset":%s,"max_bytes":%s}}'
DEEP = 100_000

MALFORMED_JSON = [
    # an integer is due
    (FETCH % ("true", "1"), "Expected `int`, got `bool` - at `$.offset`"),
    (FETCH % ("1.0", "1"), "Expected `int`, got `float` - at `$.offset`"),
    (FETCH % ("1e3", "1"), "Expected `int`, got `float` - at `$.offset`"),
    (FETCH % ('"1"', "1"), "Expected `int`, got `str` - at `$.offset`"),
    (FETCH % ("null", "1"), "Expected `int`, got `null` - at `$.offset`"),
    (FETCH % ("-1", "1"), "Expected `int` >= 0 - at `$.offset`"),
    (FETCH % ("18446744073709551616", "1"), "Expected `int` <= 18446744073709551615 - at `$.offset`"),
    (FETCH % ("1", "18446744073709551616"), "Expected `int` <= 18446744073709551615 - at `$.max_bytes`"),
    (FETCH % ("9" * 5000, "1"), "Integer value out of range - at `$.offset`"),
    (FETCH % ("NaN", "1"), "JSON is malformed: invalid character (byte 45)"),
    (FETCH % ("Infinity", "1"), "JSON is malformed: invalid character (byte 45)"),
    (FETCH % ("01", "1"), "JSON is malformed: invalid number (byte 46)"),
    ('{"Fetch":{"topic":"t","partition":4294967296,"offset":0,"max_bytes":1}}', "Expected `int` <= 4294967295 - at `$.partition`"),
    ('{"CreateTopic":{"topic":"t","partition_count":true}}', "Expected `int`, got `bool` - at `$.partition_count`"),
    # bytes are due
    (PRODUCE % "[[256]]", "Expected bytes, integers from 0 to 255 - at `$.records[0]`"),
    (PRODUCE % "[[1],[],[1,-1]]", "Expected bytes, integers from 0 to 255 - at `$.records[2]`"),
    (PRODUCE % "[[99999999999999999999999]]", "Expected bytes, integers from 0 to 255 - at `$.records[0]`"),
    (PRODUCE % "[[true]]", "Expected `int`, got `bool` - at `$.records[0][0]`"),
    (PRODUCE % "[[1.5]]", "Expected `int`, got `float` - at `$.records[0][0]`"),
    (PRODUCE % '["aGk="]', "Expected `array`, got `str` - at `$.records[0]`"),
    (PRODUCE % "[1]", "Expected `array`, got `int` - at `$.records[0]`"),
    (PRODUCE % "null", "Expected `array`, got `null` - at `$.records`"),
    # something is missing, or is something else
    ('{"Produce":{"topic":"t","partition":0}}', "Object missing required field `records`"),
    ('{"OffsetCommit":{"topic":"t","partition":0,"offset":0}}', "Object missing required field `group_id`"),
    ('{"OffsetCommit":{"topic":"t","partition":0,"offset":0,"group_id":null}}', "Expected `str`, got `null` - at `$.group_id`"),
    ('{"Produce":null}', "Expected `object`, got `null`"),
    ('{"Produce":[]}', "Expected `object`, got `array`"),
    ('{"Ping":7}', "Expected `object | null`, got `int`"),
    ('"Produce"', "unknown request: Produce"),
    ('"Hello"', "unknown request: Hello"),
    ('{"Hello":{}}', "unknown request: Hello"),
    ('{"produce":{}}', "unknown request: produce"),
    ("{}", "the object does not name a request"),
    ('{"' + "x" * 100 + '":{}}', "the object does not name a request"),
    ("[]", "Expected `object`, got `array`"),
    (" ", "Input data was truncated"),
    ("\t ", "Input data was truncated"),
    # one request a frame
    ('{"Ping":{},"Ping":{}}', "one request expected, the object has more members"),
    ('{"Ping":{},"ListTopics":{}}', "one request expected, the object has more members"),
    (PRODUCE % "[[1]]" + PRODUCE % "[[2]]", "JSON is malformed: trailing characters (byte 56)"),
    # the other JSON dialect
    (
        '{"type":"Produce","topic":"t","partition":0,"records":["aGk="]}',
        'a request with a "type" member is not supported, write {"Ping":{}} for {"type":"Ping"}',
    ),
    ('{"topic":"t","type":"Ping"}', 'a request with a "type" member is not supported, write {"Ping":{}} for {"type":"Ping"}'),
    ('{"type":7}', "unknown request: type"),
    # no JSON
    ('{"Ping"', "Input data was truncated"),
    ('{"Ping":', "Input data was truncated"),
    ('{"Ping":{}', "Input data was truncated"),
    ('{"Ping":{}}}', "JSON is malformed: trailing characters (byte 12)"),
    ('{"Ping":{}} x', "JSON is malformed: trailing characters (byte 13)"),
    ('{"Ping":}', "JSON is malformed: invalid character (byte 8)"),
    ("{'Ping':{}}", "JSON is malformed: object keys must be strings (byte 1)"),
    ('"Ping', "Input data was truncated"),
    ('"Ping" "Ping"', "JSON is malformed: trailing characters (byte 8)"),
    (r'{"\q":{}}', "JSON is malformed: invalid escape character in string (byte 4)"),
    (r'{"DescribePartition":{"topic":"\ud800","partition":1}}', "JSON is malformed: unexpected end of hex escape (byte 37)"),
    ('{"DescribeTopic":{"topic":"a\x00"}}', "JSON is malformed: invalid character (byte 28)"),
    # deep
    ("[" * DEEP, "Expected `object`, got `array`"),
    ('{"Ping":' * DEEP + "}" * DEEP, "nested too deeply"),
    ('{"Ping":{"x":' + "[" * DEEP + "]" * DEEP + "}}", "nested too deeply"),
    ('{"Ping":{"x":' + '{"x":' * DEEP + "1" + "}" * DEEP + "}}", "nested too deeply"),
    ('{"Hello":' + "[" * DEEP + "]" * DEEP + "}", "nested too deeply"),
    ('{"Ping":{},"x":' + "[" * DEEP + "]" * DEEP + "}", "nested too deeply"),
]


@pytest.mark.parametrize("text, reason", MALFORMED_JSON, ids=lambda value: value[:60])
def test_json_that_is_no_request_is_refused_with_its_reason_and_the_connection_lives(text: str, reason: str) -> None:
    refused, pinged = RequestDecoder().feed(framed(text) + framed('"Ping"'))
    assert refused == Refused(JSON, m.ErrorReply(f"failed to parse request: {reason}", 2))
    assert pinged == Received(JSON, m.Ping())


@pytest.mark.parametrize(
    "raw, at",
    [
        (b'{"DescribeTopic":{"topic":"\xff"}}', 27),
        (b'{"Ping":{"unread":"\xc3"}}', 19),
        (b'{"Ping":{"unread":"\xed\xa0\x80"}}', 19),
        (b'"\xc0\x80"', 1),
    ],
)
def test_json_that_is_not_utf8_anywhere_is_refused(raw: bytes, at: int) -> None:
    assert RequestDecoder().feed(framed(raw)) == [Refused(JSON, m.ErrorReply(f"failed to parse request: invalid UTF-8 at byte {at}", 2))]


MALFORMED_BINARY = [
    ("01", "decode error: missing topic length"),
    ("01 00", "decode error: missing topic length"),
    ("01 0002 74", "decode error: truncated topic"),
    ("01 ffff 74", "decode error: truncated topic"),
    ("01 0001 74", "decode error: missing partition"),
    ("01 0001 74 000000", "decode error: missing partition"),
    ("01 0001 74 00000000", "decode error: missing record count"),
    ("01 0001 74 00000000 00000001", "decode error: truncated record length"),
    ("01 0001 74 00000000 00000001 000000", "decode error: truncated record length"),
    ("01 0001 74 00000000 00000001 00000001", "decode error: truncated record"),
    ("01 0001 74 00000000 00000001 ffffffff 61", "decode error: truncated record"),
    ("01 0001 74 00000000 00000002 00000001 61", "decode error: truncated record length"),
    ("01 0001 74 00000000 00000002 00000001 61 00000002 61", "decode error: truncated record"),
    ("01 0001 74 00000000 00000002 00000001 61 00000000 00", None),
    ("01 0001 74 00000000 ffffffff", "decode error: too many records: 4294967295 (max: 250000)"),
    ("01 0001 74 00000000 0003d091", "decode error: too many records: 250001 (max: 250000)"),
    ("01 0001 ff", "decode error: invalid utf8 topic: invalid utf-8 sequence of 1 bytes from index 0"),
    ("01 0002 61c3", "decode error: invalid utf8 topic: incomplete utf-8 byte sequence from index 1"),
    ("01 0001 ff 00000000 00000001 00000001 78", "decode error: invalid utf8 topic: invalid utf-8 sequence of 1 bytes from index 0"),
    ("02", "decode error: missing group_id length"),
    ("02 0001", "decode error: truncated group_id"),
    ("02 0001 ff", "decode error: invalid utf8 group_id: invalid utf-8 sequence of 1 bytes from index 0"),
    ("02 0000", "decode error: missing topic length"),
    ("02 0000 0001 74", "decode error: missing partition"),
    ("02 0000 0001 74 00000000", "decode error: missing offset"),
    ("02 0000 0001 74 00000000 0000000000000000", "decode error: missing max_bytes"),
    ("03", "decode error: missing group length"),
    ("03 0001", "decode error: truncated group"),
    ("03 0001 80", "decode error: invalid utf8 group: invalid utf-8 sequence of 1 bytes from index 0"),
    ("03 0000 0000 00000000", "decode error: missing offset"),
    ("04 0000 0000", "decode error: missing partition"),
    ("05 0001 74", "decode error: missing partition count"),
    ("07", "decode error: missing topic length"),
    ("08 0001 74", "decode error: missing partition"),
]


@pytest.mark.parametrize("payload, reason", MALFORMED_BINARY)
def test_binary_that_is_no_request_is_refused_in_the_words_of_the_original(payload: str, reason: str | None) -> None:
    answer, pinged = RequestDecoder().feed(framed(bytes.fromhex(payload)) + bytes.fromhex("00000001 ff"))
    if reason is None:
        assert answer == Received(BINARY, m.Produce("t", 0, [b"a", b""]))
    else:
        assert answer == Refused(BINARY, m.ErrorReply(f"Decode error: {reason}", 2))
    assert pinged == Received(BINARY, m.Ping())


def test_a_payload_that_begins_like_neither_dialect_is_refused_in_the_last_one() -> None:
    decoder = RequestDecoder()
    assert decoder.feed(framed(b"\x80")) == [Refused(JSON, m.ErrorReply("failed to parse request: unknown request type: 128", 2))]
    decoder.feed(bytes.fromhex("00000001 ff"))
    assert decoder.feed(framed(b"\xfe")) == [Refused(BINARY, m.ErrorReply("Decode error: unknown request type: 254", 2))]
    decoder.feed(framed("{"))
    assert decoder.feed(framed(b"\x00")) == [Refused(JSON, m.ErrorReply("failed to parse request: unknown request type: 0", 2))]


EXPECTED_DIALECTS = {**dict.fromkeys([*range(1, 9), 0xFF], BINARY), **dict.fromkeys(b'{"[ \t\r\n', JSON)}


@pytest.mark.parametrize("first", range(256))
def test_the_first_byte_alone_chooses_the_dialect(first: int) -> None:
    decoder = RequestDecoder()
    decoder.feed(framed("{"))
    (answer,) = decoder.feed(framed(bytes([first, 0])))
    assert answer.dialect is EXPECTED_DIALECTS.get(first, JSON)
    if first not in EXPECTED_DIALECTS:
        assert isinstance(answer, Refused)
        assert answer.error.message == f"failed to parse request: unknown request type: {first}"


def test_a_lone_tab_byte_asks_for_metrics_and_a_longer_one_is_white_space() -> None:
    assert RequestDecoder().feed(framed(b"\t")) == [Received(BINARY, m.MetricsFetch())]
    assert RequestDecoder().feed(framed(b'\t"Ping"')) == [Received(JSON, m.Ping())]


@pytest.mark.parametrize(
    "before, length, answer",
    [
        (b"", 10_485_761, Refused(JSON, m.ErrorReply("max frame size exceeded: 10485761 bytes (max 10485760)", 1), fatal=True)),
        (b"", 0, Refused(JSON, m.ErrorReply("failed to parse request: empty frame", 1), fatal=True)),
        (
            b"\xff",
            4_294_967_295,
            Refused(BINARY, m.ErrorReply("Frame error: frame too large: 4294967295 bytes (max: 10485760)", 1), fatal=True),
        ),
        (b"\xff", 0, Refused(BINARY, m.ErrorReply("Frame error: invalid protocol: zero-length frame", 1), fatal=True)),
    ],
)
def test_a_wrong_length_is_answered_at_once_in_the_last_dialect_and_ends_the_stream(before: bytes, length: int, answer: Refused) -> None:
    decoder = RequestDecoder()
    if before:
        decoder.feed(framed(before))
    assert decoder.feed(length.to_bytes(4, "big")) == [answer]
    assert decoder.feed(framed('"Ping"')) == []


def test_requests_before_a_wrong_length_are_still_answered_first() -> None:
    answers = RequestDecoder().feed(framed('"Ping"') + bytes(4) + framed('"Ping"'))
    assert answers == [Received(JSON, m.Ping()), Refused(JSON, errors.bad_length(JSON, 0), fatal=True)]


@pytest.mark.parametrize("dialect", Dialect)
def test_the_text_of_an_error_that_quotes_a_huge_name_is_cut_to_fit(dialect: Dialect) -> None:
    error = errors.no_partition(dialect, "\U0001f600" * 3_000_000, 0)
    frame = encode_reply(dialect, error)
    assert len(frame) < 65_536
    (reply,) = ReplyDecoder().feed(frame)
    assert isinstance(reply, m.ErrorReply)
    assert len(reply.message) == 8_192 and reply.message.endswith("…")


@pytest.mark.parametrize(
    "payload",
    [
        b"\x80",
        b"\xfe\x00",
        b"\x01\x00",
        b"\x02\x00\x00\x00\x02" + bytes(4) + bytes(4) + b"\x00" * 7 + b"\x01",
        b'{"Fetch":{"records":[{"offset":0,"payload":[256]}],"next_offset":1}}',
        b'{"Produce":{"offsets":[-1]}}',
        b'{"Produce":{"offsets":[18446744073709551616]}}',
        b'{"Hello":{}}',
        b'"Ping"',
        b"{}",
        b"[",
    ],
)
def test_a_reply_that_is_none_raises_for_the_client(payload: bytes) -> None:
    with pytest.raises(Undecodable):
        ReplyDecoder().feed(framed(payload))


@pytest.mark.parametrize("length", [0, 10_485_761])
def test_a_reply_frame_of_a_wrong_length_raises_for_the_client(length: int) -> None:
    with pytest.raises(Undecodable, match=str(length)):
        ReplyDecoder().feed(length.to_bytes(4, "big"))
