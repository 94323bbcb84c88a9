"""Large JSON payloads decoded in steps: the same request, or an error, as decoded in one step."""

from __future__ import annotations

import pytest

from headrace.limits import RUSTLOG_DECODE_STEP_BYTES, RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX
from headrace.wire.rustlog import Deferred, Received, Refused, RequestDecoder, decode_in_steps
from headrace.wire.rustlog import messages as m
from headrace.wire.rustlog.json import decode_request, decode_request_in_steps
from tests.wire.rustlog.vectors import BINARY, JSON, framed

HEAD = '{"Produce":{"topic":"t,[]","partition":0,"records":'


def in_steps(payload: bytes, step_bytes: int) -> tuple[m.Request, int]:
    """The request, and the number of steps that it took."""
    steps, count = decode_request_in_steps(payload, step_bytes), 0
    while True:
        count += 1
        try:
            next(steps)
        except StopIteration as end:
            return end.value, count


@pytest.mark.parametrize("step_bytes", range(1, 40))
@pytest.mark.parametrize(
    "records",
    [
        "[]",
        " [ ] ",
        "[[]]",
        "[[],[],[ ],[]]",
        "[[1,2,3,4,5,6,7,8,9,10,11,12]]",
        "[ [ 1 , 2 ] , [ 255 , 0 ] , [ ] , [7] ]",
        "[[1],[20,30],[],[40,50,60,70,80,90,100,110,120],[],[1,2]]",
    ],
)
def test_records_cut_anywhere_decode_to_the_same_request(records: str, step_bytes: int) -> None:
    payload = f'{HEAD}{records},"more":[1,"],[",2]}}}}'.encode()
    assert in_steps(payload, step_bytes)[0] == decode_request(payload)


@pytest.mark.parametrize("step_bytes", [1, 3, 1_000])
@pytest.mark.parametrize(
    "records",
    ['"x"', "{}", "[1,2]", '[[1,2],["],["]]', "[[1,[2],3],[4]]", "[[1,{},2]]", "[[1],[2],[256]]", "[[1.5]]", "[[1,,2]]", "[[1],2]"],
)
def test_records_that_are_no_arrays_of_bytes_are_an_error(records: str, step_bytes: int) -> None:
    payload = f"{HEAD}{records}}}}}".encode()
    with pytest.raises(m.Undecodable):
        decode_request(payload)
    with pytest.raises(m.Undecodable):
        in_steps(payload, step_bytes)


def test_an_error_names_the_record_whatever_the_step() -> None:
    with pytest.raises(m.Undecodable, match=r"integers from 0 to 255 - at `\$.records\[2\]`"):
        in_steps(f"{HEAD}[[1],[2],[3,256]]}}}}".encode(), 1)
    for step_bytes in range(1, 20):
        with pytest.raises(m.Undecodable, match=r"Expected `int`, got `str` - at `\$.records\[2\]\[4\]`"):
            in_steps(f'{HEAD}[[1],[2],[0,1,2,3,"4"]]}}}}'.encode(), step_bytes)
        with pytest.raises(m.Undecodable, match=r"Expected `array`, got `int` - at `\$.records\[2\]`"):
            in_steps(f"{HEAD}[[1],[2],3]}}}}".encode(), step_bytes)


@pytest.mark.parametrize("records", [b"[]," * 100_000 + b"[]", b"[" + b"0," * 150_000 + b"0]"])
def test_a_payload_of_300_kb_takes_a_step_for_every_64_kib(records: bytes) -> None:
    payload = HEAD.encode() + b"[" + records + b"]}}"
    request, count = in_steps(payload, RUSTLOG_DECODE_STEP_BYTES)
    assert request == decode_request(payload)
    assert count >= len(payload) // RUSTLOG_DECODE_STEP_BYTES + 1


def test_only_a_json_payload_above_one_step_is_deferred() -> None:
    largest = b'"Ping"'.ljust(RUSTLOG_DECODE_STEP_BYTES)
    decoder = RequestDecoder(defers_large=True)
    assert decoder.feed(framed(largest)) == [Received(JSON, m.Ping())]
    (deferred,) = decoder.feed(framed(largest + b" "))
    assert isinstance(deferred, Deferred) and deferred == Deferred(JSON, largest + b" ")
    with pytest.raises(StopIteration) as decoded:
        next(decode_in_steps(deferred))
    assert decoded.value.value == Received(JSON, m.Ping())
    binary = b"\x06\0\1t".ljust(RUSTLOG_DECODE_STEP_BYTES + 1)
    assert isinstance(decoder.feed(framed(binary))[0], Received | Refused)


@pytest.mark.parametrize("first", [b'"Ping"', b"\xff"])
def test_a_peer_without_rights_sends_frames_of_8_kib_and_no_larger_ones(first: bytes) -> None:
    largest = first.ljust(RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX)
    decoder = RequestDecoder(lambda: False)
    (received,) = decoder.feed(framed(largest))
    assert isinstance(received, Received)
    (refused,) = decoder.feed(framed(largest + b" ")[:4])  # by its length alone
    assert isinstance(refused, Refused) and refused.fatal
    text = (
        "Frame error: frame too large: 8193 bytes (max: {})"
        if received.dialect is BINARY
        else "max frame size exceeded: 8193 bytes (max {})"
    )
    assert refused.error.message == text.format("8192 for a peer without rights")
    assert decoder.feed(framed(largest)) == []


def test_rights_are_looked_up_for_large_frames_only() -> None:
    lookups: list[bool] = []

    def has_rights() -> bool:
        lookups.append(True)
        return True

    decoder = RequestDecoder(has_rights)
    decoder.feed(framed(b'"Ping"'.ljust(RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX)))
    assert lookups == []
    (received,) = decoder.feed(framed(b'"Ping"'.ljust(RUSTLOG_NO_RIGHTS_FRAME_BYTES_MAX + 1)))
    assert received == Received(JSON, m.Ping()) and lookups == [True]
