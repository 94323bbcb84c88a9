"""Text of messages and names as harmless HTML."""

from __future__ import annotations

import json

import pytest

from headrace.console.text import TEXT_BYTES_MAX, preview, show_value, size_text, visible


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("<script>alert(1)</script>", "&lt;script&gt;alert(1)&lt;/script&gt;"),
        ("\x1b[31mred", '<span class="escaped">\\x1b</span>[31mred'),
        ("a\u202eb", 'a<span class="escaped">\\u202e</span>b'),
        ("a\u200bb", 'a<span class="escaped">\\u200b</span>b'),
        ("line\nline", 'line<span class="escaped">\\n</span>line'),
        ("zero\0", 'zero<span class="escaped">\\x00</span>'),
        ("\ud800", '<span class="escaped">\\ud800</span>'),
        ("'\"", "&#39;&#34;"),
        ("äöü €", "äöü €"),
    ],
)
def test_hostile_text_is_escaped_and_made_visible(hostile: str, shown: str) -> None:
    assert visible(hostile) == shown


def test_text_of_several_lines_keeps_its_lines() -> None:
    assert visible("a\n\tb\x07", lines=True) == 'a\n\tb<span class="escaped">\\x07</span>'


def test_a_preview_is_one_short_line() -> None:
    assert preview(b"x" * 1_000_000) == "x" * 160 + "…"
    assert preview(b"\xff\xfe") == "\\xff\\xfe"
    assert preview(None) == '<span class="muted">none</span>'


def test_json_is_shown_as_a_tree_with_its_deep_parts_folded() -> None:
    shown = show_value(json.dumps({"a": {"b": {"c": [1, None, "<b>"]}}}).encode())
    assert shown.format == "json"
    assert shown.html.count("<details") == 4 and shown.html.count(" open>") == 2
    assert "&lt;b&gt;" in shown.html and "<b>" not in shown.html


@pytest.mark.parametrize(
    ("value", "format"),
    [(b"{", "text"), (b"plain", "text"), (b"\xff\xfe\0", "hex"), ("ä".encode(), "text"), (b"1" * 10_000, "text"), (b"[" * 100_000, "text")],
)
def test_other_values_are_shown_as_text_or_hexadecimal(value: bytes, format: str) -> None:
    assert show_value(value).format == format


def test_a_large_value_is_cut_and_says_so() -> None:
    value = b'{"a": "' + b"x" * 5_000_000 + b'"}'
    shown = show_value(value)
    assert shown.is_cut and len(shown.html) < 2 * TEXT_BYTES_MAX


def test_a_document_with_very_many_elements_is_cut() -> None:
    shown = show_value(json.dumps(list(range(10_000))).encode())
    assert shown.is_cut and "more" in shown.html and len(shown.html) < 200_000


def test_a_wanted_format_that_does_not_apply_gives_its_reason() -> None:
    assert show_value(b"{", "json").fault.startswith("not JSON")
    assert show_value(b"x", "avro").fault == "the topic requires no avro schema"


def test_a_hexadecimal_dump_has_offsets_and_printable_characters() -> None:
    assert "00000000  41 00 42" in show_value(b"A\0B", "hex").html and "A·B" in show_value(b"A\0B", "hex").html


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3.0 TiB")])
def test_sizes_have_units(size: int, text: str) -> None:
    assert size_text(size) == text
