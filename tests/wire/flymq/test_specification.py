"""The hex examples of the specification and of the notes on it, as vectors."""

from __future__ import annotations

import pytest

from headrace.wire.flymq import Dialect, Opcode, ReplyDecoder, RequestDecoder, decode_reply, encode_failure, encode_reply, encode_request
from headrace.wire.flymq.fields import B32, S16, Repeated
from headrace.wire.flymq.framing import decode_failure
from headrace.wire.flymq.messages import (
    CreateTopic,
    Done,
    Failure,
    ProduceBatch,
    RecordMetadataBatch,
    ReplyFrame,
    UnknownOpcode,
)
from headrace.wire.flymq.opcodes import SPECIFIED
from headrace.wire.flymq.reader import Reader
from headrace.wire.flymq.table import SPOKEN

from .samples import bytewise, decoded, raw

# The header of this example says 0x13 (19), the payload below it has 23 bytes: the length leaves out the partition.
PRODUCE_AS_PRINTED = bytes.fromhex("AF01010100000013 0004 74657374 00000000 00000005 68656C6C6F FFFFFFFF")
PRODUCE_CORRECTED = bytes.fromhex("AF01010100000017 0004 74657374 00000000 00000005 68656C6C6F FFFFFFFF")
METADATA = bytes.fromhex("AF01010100000022 0004 74657374 00000000 000000000000002A 0000018D5A3B2C00 FFFFFFFF 00000005")

KNOWN_WRONG = {
    "PRODUCE request, header length": "0x13 does not count the partition; 0x17 does",
    "RecordMetadata, timestamp": "the bytes are 1706615843840, the remark beside them says 1705123456000",
}


@pytest.mark.parametrize(
    ("field", "value", "encoded"),
    [
        (S16, "hello", "00 05 68 65 6C 6C 6F"),
        (B32, b"\xde\xad\xbe\xef", "00 00 00 04 DE AD BE EF"),
        (Repeated(S16), ["a", "bc"], "00 00 00 02 00 01 61 00 02 62 63"),
    ],
)
def test_the_encoding_examples_hold_both_ways(field: Repeated[str], value: list[str], encoded: str) -> None:
    assert field.write(value) == bytes.fromhex(encoded)
    assert field.read(Reader(bytes.fromhex(encoded))) == value


def test_the_produce_example_with_its_length_corrected_holds_both_ways() -> None:
    batch = ProduceBatch("test", [b"hello"])
    assert RequestDecoder().feed(PRODUCE_CORRECTED) == [batch]
    assert encode_request(batch) == PRODUCE_CORRECTED


@pytest.mark.parametrize("behind", [b"", PRODUCE_CORRECTED])
def test_the_produce_example_works_even_as_printed(behind: bytes) -> None:
    expected = [("test", None, b"hello", -1)] * (2 if behind else 1)
    assert decoded([PRODUCE_AS_PRINTED + behind]) == expected
    assert decoded(bytewise(PRODUCE_AS_PRINTED + behind)) == expected


def test_the_record_metadata_example_holds_both_ways() -> None:
    batch = RecordMetadataBatch("test", [0], [42], [1706615843840], [-1], [5])
    assert ReplyDecoder().feed(METADATA) == [batch]
    assert encode_reply(Opcode.PRODUCE, batch) == METADATA


def test_the_errors_in_the_examples_are_still_there_to_be_listed() -> None:
    assert len(KNOWN_WRONG) == 2
    assert PRODUCE_AS_PRINTED[7] != len(PRODUCE_AS_PRINTED) - 8
    assert int.from_bytes(bytes.fromhex("0000018D5A3B2C00")) != 1705123456000


def test_an_error_is_a_false_bool_and_a_text() -> None:
    text = "topic not found: orders"
    assert encode_failure(Failure(text), Dialect.SPEC) == raw(0xFF, b"\x00\x00\x17" + text.encode())


def test_an_error_for_a_client_of_the_original_is_a_code_and_a_text() -> None:
    assert encode_failure(Failure("no", 1), Dialect.SDK) == raw(0xFF, b"\x00\x00\x00\x01\x00\x02no")


def test_an_error_for_the_go_client_is_the_bare_text_that_it_prints() -> None:
    text = "topic not found: orders"
    error = encode_failure(Failure(text, 1), Dialect.GO)
    assert error == raw(0xFF, text.encode())
    assert decode_failure(error[8:]) == Failure(text)


@pytest.mark.parametrize("dialect", list(Dialect))
@pytest.mark.parametrize("size", [0, 1, 126, 127, 128, 255, 256, 40_000])
def test_no_error_text_is_longer_than_127_bytes(dialect: Dialect, size: int) -> None:
    (frame,) = ReplyDecoder().feed(encode_failure(Failure("x" * size), dialect))
    failure = decode_reply(frame) if isinstance(frame, ReplyFrame) else None
    assert isinstance(failure, Failure)
    assert failure.message == ("x" * size if size <= 127 else "x" * 124 + "...")


def test_a_long_error_text_is_cut_between_characters() -> None:
    frame = encode_failure(Failure("ä" * 100), Dialect.SPEC)
    assert decode_failure(frame[8:]) == Failure("ä" * 62 + "...")


@pytest.mark.parametrize("payload", [b"topic not found", b"EOF", b"", b"\x00", b"\xff\xfe\x00\x00\x00\x07"])
def test_an_error_of_any_form_is_still_an_error(payload: bytes) -> None:
    assert decode_failure(payload) == Failure(payload.decode("utf-8", "replace"))


@pytest.mark.parametrize("code", [0, 1, 255])
def test_the_two_forms_of_an_error_are_told_apart_by_their_lengths(code: int) -> None:
    for size in range(128):
        failure = Failure("e" * size, code)
        assert decode_failure(encode_failure(failure, Dialect.SDK)[8:]) == failure
        assert decode_failure(encode_failure(failure, Dialect.SPEC)[8:]) == Failure("e" * size)


def test_the_lone_bool_of_the_original_reads_as_done() -> None:
    assert decode_reply(ReplyFrame(Opcode.CREATE_TOPIC, b"\x01")) == Done(True, "")
    assert encode_reply(Opcode.CREATE_TOPIC, Done()) == raw(0x03, b"\x01\x00\x00")


def test_every_opcode_of_the_specification_is_spoken() -> None:
    advanced = {0x0F, *range(0x10, 0x16), 0x20, 0x21, 0x22, 0x30, 0x31, 0x35, *range(0x40, 0x44), *range(0x50, 0x54)}
    core = {*range(0x01, 0x0C), *advanced, *range(0x60, 0x6B), 0x70, *range(0x72, 0x7F), 0x80, 0x81, 0xA0, 0xA1}
    assert core == SPOKEN
    assert core == SPECIFIED


def test_every_other_opcode_is_unknown_and_the_stream_goes_on() -> None:
    for opcode in set(range(256)) - SPECIFIED:
        stream = raw(opcode, b"whatever") + encode_request(CreateTopic("t", 1))
        assert RequestDecoder().feed(stream) == [UnknownOpcode(opcode), CreateTopic("t", 1)]
