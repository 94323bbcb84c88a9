from __future__ import annotations

import unicodedata

import pytest

from headrace.broker.topics import check_name, check_topic_name
from headrace.errors import InvalidRequest, InvalidTopicName
from headrace.limits import GROUP_NAME_BYTES_MAX, TOPIC_NAME_BYTES_MAX


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "orders.eu-1",
        "größe",
        "名前",
        "a/b",
        "../x",
        "...",
        "_x",
        "👩‍🚒",
        "x" * TOPIC_NAME_BYTES_MAX,
        "ü" * (TOPIC_NAME_BYTES_MAX // 2),
    ],
)
def test_names_people_use_are_fine(name: str) -> None:
    check_topic_name(name)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("", "empty"),
        (".", "reserved"),
        ("..", "reserved"),
        ("__offsets", "internal"),
        ("__", "internal"),
        ("a b", "white space"),
        ("a\u00a0b", "white space"),
        ("a\u2028b", "white space"),
        ("tab\t", "control character"),
        ("nul\x00", "control character"),
        ("del\x7f", "control character"),
        ("c1\x85", "control character"),
        ("\ud800", "surrogate"),
        (unicodedata.normalize("NFD", "größe"), "normal form C"),
        ("x" * (TOPIC_NAME_BYTES_MAX + 1), f"longer than {TOPIC_NAME_BYTES_MAX} bytes"),
        ("ü" * (TOPIC_NAME_BYTES_MAX // 2 + 1), f"longer than {TOPIC_NAME_BYTES_MAX} bytes"),
    ],
)
def test_a_bad_name_is_refused_with_its_reason(name: str, fault: str) -> None:
    with pytest.raises(InvalidTopicName, match=fault):
        check_topic_name(name)


def test_other_names_may_contain_what_is_not_reserved_for_them() -> None:
    for name in (".", "__mine", "my group", "x" * GROUP_NAME_BYTES_MAX):
        check_name("group", name)


def test_other_names_are_bounded_and_printable() -> None:
    for name in ("", "a\nb", "\ud800", "x" * (GROUP_NAME_BYTES_MAX + 1)):
        with pytest.raises(InvalidRequest, match="group name"):
            check_name("group", name)
