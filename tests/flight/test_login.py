"""Authentication of callers: passwords, tokens, API keys, certificates, and none."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from pyarrow import flight

from headrace.access.access import AccessSettings, Mode
from headrace.access.administration import Caller
from headrace.broker.authorizer import Action, Principal, Resource
from headrace.errors import LoginFailed, NotAuthorized, Unavailable
from headrace.flight.calls import Calls
from headrace.flight.client import FlightClient, Servers
from headrace.flight.endpoint import EndpointSettings
from headrace.flight.login import Callers, LoginMiddleware, Tokens, certified
from headrace.limits import FLIGHT_TOKEN_SECONDS_MAX
from headrace.records import RecordBatch
from tests.flight.harness import Harness, rows, running_harness, values

ENFORCED = AccessSettings(Mode.ENFORCED)


@pytest.fixture(scope="module")
def guarded() -> Iterator[Harness]:
    with running_harness(access=ENFORCED) as harness:
        yield harness


def admin(harness: Harness) -> FlightClient:
    assert harness.password is not None
    return harness.client(user="admin", password=harness.password)


def witnessed(harness: Harness) -> set[str]:
    """Record the users that are authorized from now on."""
    seen: set[str] = set()

    def authorize(who: Principal, action: Action, resource: Resource) -> bool:
        seen.add(f"{who.name}@{who.protocol}")
        return True

    harness.broker._authorizer._authorize = authorize
    return seen


def test_a_user_logs_in_and_may_do_what_rules_say(guarded: Harness) -> None:
    with admin(guarded) as flight_client:
        flight_client.create_topic("t")
        flight_client.append("t", [values(b"x")])
        assert [row["value"] for row in rows(flight_client, "t")] == [b"x"]


def test_a_caller_without_credentials_has_no_permission(guarded: Harness) -> None:
    with admin(guarded) as flight_client:
        flight_client.ensure_topic("secret")
    with guarded.client() as anonymous:
        assert anonymous.topics() == []
        for call in (
            lambda: anonymous.describe(["secret"]),
            lambda: list(anonymous.read("secret", 0, 0, 0)),
            lambda: anonymous.append("secret", [values(b"x")]),
            lambda: anonymous.stage("h", [values(b"x")], topic="secret", writer="a"),
            lambda: anonymous.create_topic("mine"),
            lambda: anonymous.commit("g", {"secret": {0: 0}}),
        ):
            with pytest.raises(NotAuthorized, match="anonymous may not"):
                call()


@pytest.mark.parametrize(("user", "password"), [("admin", "wrong password"), ("nobody of that name", "wrong password")])
def test_a_wrong_password_is_rejected_without_saying_what_was_wrong(guarded: Harness, user: str, password: str) -> None:
    with guarded.client(user=user, password=password) as flight_client, pytest.raises(LoginFailed, match="invalid username or password"):
        flight_client.topics()


def test_a_token_that_is_not_good_any_more_is_renewed_by_the_client(guarded: Harness) -> None:
    with admin(guarded) as flight_client:
        flight_client.topics()
        first = flight_client._token
        flight_client._token = (b"authorization", b"Bearer expired")
        flight_client.ensure_topic("renewed")
        assert flight_client._token not in (first, (b"authorization", b"Bearer expired"))
        flight_client._token = (b"authorization", b"Bearer expired")
        assert rows(flight_client, "renewed") == []
        flight_client._token = (b"authorization", b"Bearer expired")
        assert flight_client.append("renewed", [values(b"x")]).records == 1


@pytest.mark.parametrize(
    "header", ["Bearer nonsense", "Basic !!!", "Basic " + base64.b64encode(b"nocolon").decode(), "Digest x", "", "Basic"]
)
def test_a_header_that_proves_nothing_is_rejected(guarded: Harness, header: str) -> None:
    with flight.FlightClient(f"grpc://{guarded.endpoint.address}") as plain:
        options = flight.FlightCallOptions(headers=[(b"authorization", header.encode())])
        with pytest.raises(flight.FlightUnauthenticatedError):
            list(plain.do_action(flight.Action("topics", b""), options))


def test_plain_flight_logs_in_with_a_basic_token(guarded: Harness) -> None:
    with flight.FlightClient(f"grpc://{guarded.endpoint.address}") as plain:
        token = plain.authenticate_basic_token("admin", guarded.password)
        assert list(plain.do_action(flight.Action("topics", b""), flight.FlightCallOptions(headers=[token])))


def test_an_api_key_stands_for_its_owner(guarded: Harness) -> None:
    caller = Caller(Principal("admin", "internal"))
    with admin(guarded) as flight_client:
        flight_client.ensure_topic("t")
    made = guarded.run(guarded.access.administration.create_key(caller, "admin", []))
    with guarded.client(password=made.text) as flight_client:
        assert "t" in flight_client.topics()
    with guarded.client(password=made.text + "x") as flight_client, pytest.raises(LoginFailed):
        flight_client.topics()


def test_a_user_who_is_disabled_loses_what_the_token_gave(guarded: Harness) -> None:
    caller = Caller(Principal("admin", "internal"))
    administration = guarded.access.administration
    with admin(guarded) as flight_client:
        flight_client.ensure_topic("t")
    guarded.run(administration.create_user(caller, "eve", "a long password", ["consumer"]))
    with guarded.client(user="eve", password="a long password") as flight_client:
        assert flight_client.topics()
        guarded.run(administration.update_user(caller, "eve", ["consumer"], enabled=False))
        assert flight_client.topics() == []


def test_a_changed_password_ends_the_tokens_of_the_old_one(guarded: Harness) -> None:
    caller = Caller(Principal("admin", "internal"))
    administration = guarded.access.administration
    with admin(guarded) as flight_client:
        flight_client.ensure_topic("t")
    guarded.run(administration.create_user(caller, "finn", "a long password", ["consumer"]))
    with guarded.client(user="finn", password="a long password") as flight_client:
        assert flight_client.topics()
        guarded.run(administration.change_password(caller, "finn", "another password", ""))
        assert flight_client.topics() == []
        with pytest.raises(NotAuthorized):
            flight_client.describe(["t"])


def test_a_key_is_verified_once_for_many_calls_and_a_revoked_one_ends_all_the_same(
    guarded: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = Caller(Principal("admin", "internal"))
    with admin(guarded) as flight_client:
        flight_client.ensure_topic("t")
    made = guarded.run(guarded.access.administration.create_key(caller, "admin", []))
    verified: list[Principal | None] = []
    inner = guarded.access.verify_key

    def verify(text: str, caller: Caller) -> Principal | None:
        verified.append(inner(text, caller))
        return verified[-1]

    monkeypatch.setattr(guarded.access, "verify_key", verify)
    with guarded.client(password=made.text) as flight_client:
        for _ in range(5):
            assert "t" in flight_client.topics()
        assert len(verified) == 1, "each would be a login in the audit log"
        guarded.run(guarded.access.administration.revoke_key(caller, made.id))
        assert flight_client.topics() == []
        with pytest.raises(NotAuthorized):
            flight_client.describe(["t"])


@pytest.mark.parametrize("name", ["reader.example", "spiffe://example/ns@1/reader", "reader"])
def test_a_certificate_is_the_user_of_its_name(name: str) -> None:
    assert certified(name.encode()) == Principal(name, "flight")


@pytest.mark.parametrize("name", [b"10.0.0.7", b"::1", b"ada@example.com", b"a\nb", b"\xff"])
def test_a_name_that_other_protocols_do_not_go_by_is_rejected(name: bytes) -> None:
    with pytest.raises(LoginFailed):
        certified(name)


@pytest.mark.parametrize("header", ["Basic \u00e9", "Basic \ufffd", "Basic /w==", "Basic a"])
def test_credentials_that_cannot_be_read_are_no_defect(guarded: Harness, header: str) -> None:
    """gRPC rejects headers that are not ASCII; the code does not rely on it."""
    middleware = LoginMiddleware(Callers(guarded.endpoint._bridge, guarded.access, "anonymous"), Calls(1))
    with pytest.raises(flight.FlightUnauthenticatedError):
        middleware.start_call(None, {"authorization": [header]})


def test_tokens_end_and_the_oldest_make_room() -> None:
    now = [0.0]
    tokens, who = Tokens(lambda: now[0], count_max=2), Principal("u", "flight")
    first, second = tokens.give(who), tokens.give(who)
    assert tokens.owner(first) == tokens.owner(second) == who
    third = tokens.give(who)
    assert (tokens.owner(first), tokens.owner(third)) == (None, who)
    now[0] = FLIGHT_TOKEN_SECONDS_MAX
    assert tokens.owner(second) is None
    assert tokens.owner("nonsense") is None


def test_an_open_broker_knows_callers_by_the_principal_of_the_endpoint() -> None:
    with running_harness(settings=EndpointSettings(principal="spark")) as harness:
        seen = witnessed(harness)
        harness.topic("t")
        with harness.client() as flight_client:
            flight_client.describe(["t"])
        assert "spark@flight" in seen


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def written(directory: Path, name: str, content: bytes) -> str:
    path = directory / name
    path.write_bytes(content)
    return str(path)


def sealed(authority: trustme.CA, *, ask_clients: bool = False) -> EndpointSettings:
    leaf = authority.issue_cert("localhost", "127.0.0.1")
    chain = b"".join(part.bytes() for part in leaf.cert_chain_pems)
    ca = authority.cert_pem.bytes() if ask_clients else b""
    return EndpointSettings(certificate=chain, key=leaf.private_key_pem.bytes(), client_ca=ca)


def test_a_tls_endpoint_accepts_tls_only(tmp_path: Path, authority: trustme.CA) -> None:
    ca_file = written(tmp_path, "ca.pem", authority.cert_pem.bytes())
    with running_harness(settings=sealed(authority), access=ENFORCED) as harness:
        assert harness.password is not None
        with harness.client(user="admin", password=harness.password, tls=True, ca_file=ca_file) as flight_client:
            flight_client.create_topic("t")
            flight_client.append("t", [values(b"x")])
            assert len(rows(flight_client, "t")) == 1
        with harness.client(timeout_seconds=2.0) as plain, pytest.raises(Unavailable):
            plain.topics()
        stranger = written(tmp_path, "other.pem", trustme.CA().cert_pem.bytes())
        with harness.client(tls=True, ca_file=stranger, timeout_seconds=2.0) as distrustful, pytest.raises(Unavailable):
            distrustful.topics()


def test_a_client_certificate_is_who_the_client_is(tmp_path: Path, authority: trustme.CA) -> None:
    ca_file = written(tmp_path, "ca.pem", authority.cert_pem.bytes())
    leaf = authority.issue_cert("reader.example")
    certificate = written(tmp_path, "client.pem", b"".join(part.bytes() for part in leaf.cert_chain_pems))
    key = written(tmp_path, "client.key", leaf.private_key_pem.bytes())
    with running_harness(settings=sealed(authority, ask_clients=True)) as harness:
        seen = witnessed(harness)
        harness.topic("t")
        harness.publish("t", RecordBatch([b"x"]))
        with harness.client(tls=True, ca_file=ca_file, certificate_file=certificate, key_file=key) as flight_client:
            assert len(rows(flight_client, "t")) == 1
        assert "reader.example@flight" in seen
        other = authority.issue_cert("10.0.0.7", "reader.example")
        certificate = written(tmp_path, "other.pem", b"".join(part.bytes() for part in other.cert_chain_pems))
        key = written(tmp_path, "other.key", other.private_key_pem.bytes())
        with (
            harness.client(tls=True, ca_file=ca_file, certificate_file=certificate, key_file=key) as confused,
            pytest.raises(LoginFailed),
        ):
            confused.topics()
        with harness.client(tls=True, ca_file=ca_file, timeout_seconds=2.0) as without, pytest.raises(Unavailable):
            without.topics()


def test_a_login_is_never_part_of_what_is_shown() -> None:
    client = FlightClient(Servers.parse("a", user="u", password="hunter2"))
    assert "hunter2" not in repr(client) + repr(client._servers) + str(vars(client)["_servers"])
