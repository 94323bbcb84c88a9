"""Large appends go through the page cache only if a reader follows them."""

from __future__ import annotations

from headrace.storage.followed import FOLLOWED_BYTES, Followed

STEP = FOLLOWED_BYTES // 4
"""Size of an append of 100 records."""


def appended(followed: Followed, end: int, count: int) -> int:
    for _ in range(count):
        end += 100
        followed.appended(STEP, end)
    return end


def test_a_log_that_nobody_has_read_is_not_followed() -> None:
    followed = Followed()
    assert not followed.is_followed
    appended(followed, 0, 20)
    assert not followed.is_followed


def test_a_log_is_followed_while_a_reader_keeps_up() -> None:
    followed, end = Followed(), 0
    for _ in range(50):
        followed.read(end)
        end = appended(followed, end, 4)
        assert followed.is_followed


def test_a_log_is_not_followed_after_its_reader_stopped_or_fell_behind() -> None:
    followed = Followed()
    followed.read(appended(Followed(), 0, 4))
    appended(followed, 400, 12)
    assert not followed.is_followed


def test_a_reader_that_has_caught_up_follows_again() -> None:
    followed = Followed()
    end = appended(followed, 0, 40)
    followed.read(100)
    assert not followed.is_followed
    followed.read(end)
    assert followed.is_followed
