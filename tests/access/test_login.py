"""Authentication: passwords, pauses after failures, API keys."""

from __future__ import annotations

import asyncio
import time

import pytest
from argon2 import PasswordHasher

from headrace.access.access import Throttle
from headrace.access.administration import Caller
from headrace.access.passwords import HASHER, Passwords
from headrace.access.policy import Grant
from headrace.broker.authorizer import Action, Principal
from headrace.errors import InvalidRequest, LoginFailed, LoginThrottled, Unavailable
from headrace.limits import (
    LOGIN_PAUSE_MS_MAX,
    PASSWORD_BYTES_MAX,
    PASSWORD_CHARACTERS_MIN,
    PASSWORD_JOBS_QUEUED_MAX,
    PASSWORD_JOBS_RUNNING,
)
from tests.access.harness import ADMIN, ADMIN_PASSWORD, PASSWORD, QUICK, Guarded, bytes_in_order, guarded
from tests.broker.harness import HandClock
from tests.conftest import Proof

ANONYMOUS_CALLER = Caller(Principal("anonymous", "blipmq"), "10.0.0.9")


async def test_the_right_password_logs_in_and_a_wrong_one_does_not() -> None:
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "ann", PASSWORD, ["producer"])
        who = await harness.log_in("ann")
        assert (who.name, who.protocol) == ("ann", "flymq") and who.credential.startswith("password:")
        with pytest.raises(LoginFailed, match="invalid username or password"):
            await harness.log_in("ann", "another password")


@pytest.mark.parametrize("name", ["unknown", "disabled", "certificate", "", "\0", "x" * 70_000])
async def test_every_failed_login_has_the_same_text(name: str) -> None:
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "disabled", PASSWORD, [], enabled=False)
        await harness.administration.create_user(ADMIN, "certificate", "", [])
        for password in (PASSWORD, "", "x" * (PASSWORD_BYTES_MAX + 1)):
            with pytest.raises(LoginFailed) as caught:
                await harness.log_in(name, password)
            assert str(caught.value) == "invalid username or password"


async def test_an_unknown_user_costs_as_much_time_as_a_wrong_password() -> None:
    passwords = Passwords(bytes_in_order(), PasswordHasher(time_cost=2, memory_cost=8192, parallelism=1))
    known = await passwords.hash(PASSWORD)
    await passwords.verify("", "the first one creates the hash for unknown users")
    spent = {"": 0.0, known: 0.0}
    for _ in range(30):
        for hash in spent:
            began = time.process_time()
            assert not await passwords.verify(hash, "wrong password")
            spent[hash] += time.process_time() - began
    passwords.close()
    assert 0.5 < spent[""] / spent[known] < 2


async def test_passwords_are_hashed_with_argon2id_and_the_parameters_that_are_printed() -> None:
    text = HASHER.hash(PASSWORD)
    assert text.startswith("$argon2id$v=19$m=65536,t=3,p=2$")


@pytest.mark.parametrize(("password", "is_taken"), [("x" * (PASSWORD_CHARACTERS_MIN - 1), False), ("x" * PASSWORD_CHARACTERS_MIN, True)])
async def test_a_password_has_a_least_length(password: str, is_taken: bool) -> None:
    async with guarded() as harness:
        if is_taken:
            await harness.administration.create_user(ADMIN, "ann", password, [])
            await harness.log_in("ann", password)
        else:
            with pytest.raises(InvalidRequest, match="at least"):
                await harness.administration.create_user(ADMIN, "ann", password, [])


@pytest.mark.parametrize(("size", "is_taken"), [(PASSWORD_BYTES_MAX, True), (PASSWORD_BYTES_MAX + 1, False)])
async def test_a_password_has_a_greatest_length(size: int, is_taken: bool) -> None:
    passwords = Passwords(bytes_in_order(), QUICK)
    if is_taken:
        assert await passwords.verify(await passwords.hash("x" * size), "x" * size)
    else:
        with pytest.raises(InvalidRequest, match="at most"):
            await passwords.hash("x" * size)
    passwords.close()


async def test_a_hash_with_older_parameters_is_replaced_at_the_next_login() -> None:
    async with guarded() as harness:
        who = await harness.user("ann", "producer")
        harness.passwords._hasher = PasswordHasher(time_cost=2, memory_cost=8, parallelism=1)
        again = await harness.log_in("ann")
        assert again == who, "existing logins stay valid"
        assert "t=2" in harness.administration.user(ADMIN, "ann").hash
        await harness.log_in("ann")


async def test_many_logins_at_once_find_a_full_queue_and_the_loop_keeps_serving() -> None:
    passwords = Passwords(bytes_in_order(), PasswordHasher(time_cost=1, memory_cost=32_768, parallelism=1))
    known = await passwords.hash(PASSWORD)
    await passwords.verify("", "warm")
    room = PASSWORD_JOBS_RUNNING + PASSWORD_JOBS_QUEUED_MAX
    attempts = [asyncio.ensure_future(passwords.verify(known, "wrong")) for _ in range(room + 10)]
    turns, longest = 0, 0.0
    while not all(attempt.done() for attempt in attempts):
        began = time.thread_time()
        await asyncio.sleep(0.001)
        longest, turns = max(longest, time.thread_time() - began), turns + 1
    refused = [attempt for attempt in attempts if attempt.exception() is not None]
    assert len(refused) == 10 and all(isinstance(attempt.exception(), Unavailable) for attempt in refused)
    assert turns > 10 and longest < 0.5
    assert await passwords.verify(known, PASSWORD), "and then there is room again"
    passwords.close()


def test_pauses_double_up_to_their_limit_and_a_good_login_ends_them() -> None:
    throttle, now = Throttle(account_free=3), 0
    for _ in range(3):
        assert throttle.pause_ms("ann", "a", now) == 0
        throttle.begin("ann", "a", now)
    pauses = []
    for _ in range(8):
        throttle.begin("ann", "a", now)
        pauses.append(throttle.pause_ms("ann", "a", now))
        now += pauses[-1]
    assert pauses == [1000, 2000, 4000, 8000, 16000, 30000, 30000, 30000] and pauses[-1] == LOGIN_PAUSE_MS_MAX
    throttle.succeeded("ann", "a")
    assert throttle.pause_ms("ann", "a", now) == 0


def test_failures_from_one_address_do_not_slow_the_account_down_at_another() -> None:
    throttle = Throttle()
    for _ in range(1_000):
        throttle.begin("ann", "10.0.0.1", 0)
    assert throttle.pause_ms("ann", "10.0.0.1", 0) == LOGIN_PAUSE_MS_MAX
    assert throttle.pause_ms("ann", "10.0.0.2", 0) == 0


def test_an_address_is_slowed_down_over_all_accounts_and_a_good_login_does_not_pay_for_guesses() -> None:
    throttle = Throttle(address_free=20)
    for number in range(25):
        throttle.begin(f"user {number}", "a", 0)
    assert throttle.pause_ms("another", "a", 0) == 16_000
    throttle.begin("mine", "a", 16_000)
    throttle.succeeded("mine", "a")
    assert throttle.pause_ms("another", "a", 16_000) == 0, "the first login of an account lowers the count and ends the pause"
    for _ in range(50):
        throttle.begin("mine", "a", 16_000)
        throttle.succeeded("mine", "a")
    throttle.begin("another", "a", 16_000)
    assert throttle.pause_ms("yet another", "a", 16_000) == 16_000, "its later logins pay for nothing"
    assert throttle.pause_ms("another", "b", 16_000) == 0


def test_an_account_that_has_logged_in_from_an_address_does_not_wait_for_the_failures_of_others_there() -> None:
    throttle = Throttle(address_free=20)
    throttle.begin("ann", "a", 0)
    throttle.succeeded("ann", "a")
    for number in range(100):
        throttle.begin(f"user {number}", "a", 0)
    assert throttle.pause_ms("ann", "a", 0) == 0
    assert throttle.pause_ms("ben", "a", 0) == LOGIN_PAUSE_MS_MAX


@pytest.mark.parametrize("jump_ms", [-40 * 86_400_000, 40 * 86_400_000])
def test_a_clock_that_jumps_lengthens_no_pause(jump_ms: int) -> None:
    throttle, now = Throttle(account_free=0, address_free=0), 50 * 86_400_000
    for _ in range(10):
        throttle.begin("ann", "a", now)
    now += jump_ms
    assert throttle.pause_ms("ann", "a", now) <= LOGIN_PAUSE_MS_MAX
    assert throttle.pause_ms("ann", "a", now + LOGIN_PAUSE_MS_MAX) == 0


@pytest.mark.parametrize(
    ("one", "other"),
    [("10.0.0.1", "::ffff:10.0.0.1"), ("::1", "[::1]"), ("fe80::1%eth0", "fe80::1"), ("2001:db8:0:1::1", "[2001:db8:0:1:ffff::9]")],
)
def test_an_address_is_one_source_however_it_is_written(one: str, other: str) -> None:
    throttle = Throttle(address_free=0)
    throttle.begin(None, one, 0)
    assert throttle.pause_ms(None, other, 0) > 0
    assert throttle.pause_ms(None, "10.9.9.9", 0) == throttle.pause_ms(None, "2001:db8:0:2::1", 0) == 0


def test_names_are_forgotten_when_there_are_too_many() -> None:
    throttle = Throttle(account_free=0, names_max=100)
    for number in range(1000):
        throttle.begin(f"user {number}", "", 0)
        throttle.succeeded(f"guest {number}", "")
    assert throttle.pause_ms("user 0", "", 0) == 0
    assert throttle.pause_ms("user 999", "", 0) > 0
    assert len(throttle._known) == 100


async def test_ten_thousand_guesses_are_slowed_down_to_a_handful(proof: Proof) -> None:
    """At a hundred guesses a second for a hundred seconds, the broker checks fewer than twenty of them."""
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "ann", PASSWORD, [])
        looked_at = 0
        for number in range(10_000):
            harness.clock.tick(10)
            try:
                await harness.log_in("ann", f"guess number {number}")
            except LoginThrottled:
                continue
            except LoginFailed:
                looked_at += 1
        assert looked_at < 20
        with pytest.raises(LoginThrottled, match="try again in"):
            await harness.log_in("ann")
        await harness.log_in("ann", address="10.0.0.10")
        harness.clock.tick(LOGIN_PAUSE_MS_MAX)
        await harness.log_in("ann")
        proof("guesses at a password", 10_000)


async def test_a_hundred_guesses_at_once_are_a_hundred_guesses() -> None:
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "ann", PASSWORD, [])
        outcomes = await asyncio.gather(*(harness.log_in("ann", f"guess {n}") for n in range(100)), return_exceptions=True)
        assert sum(isinstance(outcome, LoginFailed) for outcome in outcomes) <= 6
        assert sum(isinstance(outcome, LoginThrottled) for outcome in outcomes) >= 94


async def test_an_attempt_that_found_no_room_does_not_count_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "ann", PASSWORD, [])
        monkeypatch.setattr(harness.passwords, "_jobs", PASSWORD_JOBS_RUNNING + PASSWORD_JOBS_QUEUED_MAX)
        for _ in range(50):
            with pytest.raises(Unavailable):
                await harness.log_in("ann")
        monkeypatch.setattr(harness.passwords, "_jobs", 0)
        await harness.log_in("ann")


# Keys.


async def key_of(harness: Guarded, owner: str = "ann", expires_ms: int = 0) -> tuple[str, str]:
    made = await harness.administration.create_key(ADMIN, owner, [], expires_ms=expires_ms)
    return made.id, made.text


async def test_a_key_is_whose_it_is_and_only_as_a_whole() -> None:
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "ann", "", ["producer"])
        id, text = await key_of(harness)
        assert harness.access.verify_key(text, ANONYMOUS_CALLER) == Principal("ann", "blipmq", f"key:{id}")
        for wrong in ("", "hr", id, text[:-1], text + "x", text.upper(), text.replace(id, "a" * 12), f"hr_{id}_", "hr__"):
            assert harness.access.verify_key(wrong, ANONYMOUS_CALLER) is None
        assert harness.administration.key(ADMIN, id).used_ms == harness.clock.now


async def test_a_key_holds_256_random_bits_and_only_its_digest_is_kept() -> None:
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "ann", "", [])
        asked: list[int] = []
        source = harness.administration._random_bytes

        def random_bytes(size: int) -> bytes:
            asked.append(size)
            return source(size)

        harness.administration._random_bytes = random_bytes
        _, text = await key_of(harness)
        assert 32 in asked
        secret = text.split("_", 2)[2]
        for name in harness.engine.topics():
            batches = await harness.engine.read(name, 0, 0, bytes_max=1 << 20)
            assert not any(secret.encode() in (value or b"") for batch in batches for value in batch.values())


async def test_a_key_ends_when_it_expires_is_revoked_or_deleted_or_its_owner_goes() -> None:
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "ann", "", ["producer"])
        keys = [await key_of(harness, expires_ms=harness.clock.now + 5_000 if n == 0 else 0) for n in range(4)]
        assert all(harness.access.verify_key(text, ANONYMOUS_CALLER) for _, text in keys)
        harness.clock.tick(5_000)
        await harness.administration.revoke_key(ADMIN, keys[1][0])
        await harness.administration.delete_key(ADMIN, keys[2][0])
        assert [harness.access.verify_key(text, ANONYMOUS_CALLER) is not None for _, text in keys] == [False, False, False, True]
        await harness.administration.delete_user(ADMIN, "ann")
        assert harness.access.verify_key(keys[3][1], ANONYMOUS_CALLER) is None
        assert harness.administration.keys(ADMIN) == []


async def test_a_revoked_key_never_comes_back() -> None:
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "ann", "", [])
        id, text = await key_of(harness)
        await harness.administration.revoke_key(ADMIN, id)
        await harness.administration.alter_key(ADMIN, id, expires_ms=harness.clock.now + 1_000_000, description="again?")
        assert harness.access.verify_key(text, ANONYMOUS_CALLER) is None
        with pytest.raises(InvalidRequest, match="expired already"):
            await harness.administration.create_key(ADMIN, "ann", [Grant(frozenset({Action.READ}))], expires_ms=harness.clock.now)


async def test_guessing_keys_is_slowed_down_by_address() -> None:
    async with guarded() as harness:
        await harness.administration.create_user(ADMIN, "ann", "", [])
        _, text = await key_of(harness)
        for number in range(30):
            assert harness.access.verify_key(f"hr_{number:012d}_guess", ANONYMOUS_CALLER) is None
        assert harness.access.verify_key(text, ANONYMOUS_CALLER) is None, "nothing is checked within the pause"
        assert harness.access.verify_key(text, Caller(ANONYMOUS_CALLER.who, "10.0.0.10")) is not None


async def test_after_many_failures_from_an_address_one_good_login_lets_the_next_ones_in() -> None:
    async with guarded() as harness:
        for name in ("ann", "ben"):
            await harness.administration.create_user(ADMIN, name, PASSWORD, [])
        for number in range(40):
            with pytest.raises((LoginFailed, LoginThrottled)):
                await harness.log_in(f"unknown {number}", "wrong password")
        harness.clock.tick(LOGIN_PAUSE_MS_MAX)
        for _ in range(5):
            await harness.log_in("ann")
            await harness.log_in("ben")


async def test_a_wall_clock_that_jumps_locks_no_user_out() -> None:
    ticks = HandClock()
    harness = Guarded(ticks=ticks)
    await harness.broker.open()
    await harness.access.open(ADMIN_PASSWORD)
    harness.clock.tick(40 * 86_400_000)
    for number in range(10):
        with pytest.raises((LoginFailed, LoginThrottled)):
            await harness.log_in("admin", f"wrong password {number}")
    harness.clock.now -= 40 * 86_400_000
    ticks.tick(LOGIN_PAUSE_MS_MAX)
    await harness.log_in("admin", ADMIN_PASSWORD)
    await harness.access.close()
    await harness.broker.close()


async def test_a_login_is_written_down_with_one_text_for_each_address() -> None:
    async with guarded() as harness:
        assert (
            await harness.access.log_in("admin", ADMIN_PASSWORD, Caller(ANONYMOUS_CALLER.who, "[::ffff:10.0.0.7]"))
        ).address == "10.0.0.7"


# First start


async def test_the_first_start_makes_one_admin_and_shows_the_password_once() -> None:
    harness = Guarded()
    await harness.broker.open()
    made = await harness.access.open()
    assert made is not None and len(made) == 24
    assert harness.access.roles_of(await harness.log_in("admin", made)) == ["admin"]
    await harness.access.close()
    again = Guarded(engine=harness.engine, clock=harness.clock)
    assert await again.access.open() is None
    await again.log_in("admin", made)
    await again.access.close()
    await harness.broker.close()


async def test_a_password_from_a_file_is_used_and_not_shown() -> None:
    async with guarded() as harness:
        assert await harness.access.open(ADMIN_PASSWORD) is None
        await harness.log_in("admin", ADMIN_PASSWORD)
