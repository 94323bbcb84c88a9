"""Configuration: priority of the sources, and error messages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.records import Ack
from headrace.server.config import SECTIONS, SETTINGS, Config
from headrace.server.config_sources import explain, resolve, toml_of, toml_value
from headrace.server.settings import Address, Bind, SecretReference


@pytest.fixture
def write(tmp_path: Path) -> Path:
    return tmp_path / "headrace.toml"


def start_error(**sources: object) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(**sources)  # type: ignore[arg-type]  # each test passes the one source it is about
    text = str(caught.value)
    assert "\n" not in text, "an error is one line"
    return text


def test_without_any_source_the_tree_holds_the_defaults() -> None:
    resolved = resolve()
    assert resolved.config == Config()
    assert set(resolved.origins.values()) == {"default"}
    assert resolved.config.storage.ack is Ack.DURABLE
    assert resolved.config.storage.headroom == 256 << 20
    assert resolved.config.listen.tcp == (
        Bind(Address("127.0.0.1", 9092)),
        Bind(Address("127.0.0.1", 5555), ("blipmq",)),
        Bind(Address("127.0.0.1", 8119), ("figg",)),
    )


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(write: Path) -> None:
    write.write_text('[storage]\npath = "/file"\nack = "written"\nsegment_size = "1 MiB"\n')
    resolved = resolve(
        file=write,
        environment={"HEADRACE__STORAGE__PATH": "/environment", "HEADRACE__STORAGE__ACK": "none"},
        flags={"storage.path": ("--data", "/flag")},
    )
    storage = resolved.config.storage
    assert (storage.path, storage.ack, storage.segment_size) == (Path("/flag"), Ack.NONE, 1 << 20)
    assert resolved.origins["storage.path"] == "flag --data"
    assert resolved.origins["storage.ack"] == "environment HEADRACE__STORAGE__ACK"
    assert resolved.origins["storage.segment_size"] == f"file {write}"
    assert resolved.origins["storage.journal_size"] == "default"


def test_the_tree_cannot_be_changed() -> None:
    config = resolve().config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.storage.ack = Ack.NONE  # type: ignore[misc]  # that is the point


@pytest.mark.parametrize("name", SETTINGS)
def test_every_key_can_be_set_through_its_variable(name: str) -> None:
    known = SETTINGS[name]
    plain = known.kind.plain(known.default)
    text = ",".join(plain) if isinstance(plain, list) else toml_value(plain).strip('"')
    resolved = resolve(environment={known.variable: text})
    assert resolved.value(name) == known.default
    assert resolved.origins[name] == f"environment {known.variable}"


def test_other_variables_are_left_alone() -> None:
    assert resolve(environment={"HEADRACE_TRACEBACK": "1", "PATH": "/bin", "HEADRACE": "x"}).config == Config()


def test_what_is_shown_as_toml_reads_back_as_the_same_tree(write: Path) -> None:
    first = resolve(
        environment={
            "HEADRACE__STORAGE__PATH": '/a "quoted" \\ path\twith\u202econtrol',
            "HEADRACE__LISTEN__TCP": "[::1]:0,localhost:1=blipmq,figg",
            "HEADRACE__BLIPMQ__KEYS": "env:KEY,alice=file:/keys/alice",
            "HEADRACE__TOPICS__RETENTION": "36h",
        }
    )
    write.write_text(toml_of(first), encoding="utf-8")
    assert resolve(file=write).config == first.config


def test_an_unknown_key_names_the_nearest_valid_one(write: Path) -> None:
    write.write_text('[storage]\nsegmentsize = "1 MiB"\n')
    assert start_error(file=write) == f'{write}: unknown key "storage.segmentsize"; did you mean storage.segment_size?'


def test_an_unknown_section_names_the_nearest_valid_one(write: Path) -> None:
    write.write_text("[storge]\n")
    assert start_error(file=write) == f'{write}: unknown section "storge"; did you mean storage?'


def test_a_key_outside_its_section_names_where_it_belongs(write: Path) -> None:
    write.write_text("auto_create = true\n")
    assert start_error(file=write) == f'{write}: unknown key "auto_create"; did you mean topics.auto_create?'


def test_an_unknown_variable_names_the_nearest_valid_one() -> None:
    text = start_error(environment={"HEADRACE__LIMIT__CONNECTIONS": "5"})
    assert text == 'unknown environment variable "HEADRACE__LIMIT__CONNECTIONS"; did you mean HEADRACE__LIMITS__CONNECTIONS?'


def test_a_name_near_nothing_lists_what_is_valid(write: Path) -> None:
    write.write_text("[zzzz]\n")
    assert start_error(file=write).endswith('"zzzz"; valid are ' + ", ".join(SECTIONS[:8]) + ", …")


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("STORAGE__SEGMENT_SIZE", "5 parsecs", ["storage.segment_size", '"5 parsecs"', "unknown unit", "64 KiB to 4 GiB"]),
        ("STORAGE__SEGMENT_SIZE", "1 KiB", ["out of bounds", "64 KiB to 4 GiB"]),
        ("STORAGE__ACK", "durble", ["storage.ack", "durble", '"durable", "written", "none"']),
        ("STORAGE__CHECKPOINT_INTERVAL", "10", ["the unit is missing", "5ms"]),
        ("STORAGE__COMPRESS", "maybe", ["true or false"]),
        ("STORAGE__PATH", "", ["a path"]),
        ("STORAGE__KEY_ENV", "no such name", ["environment variable"]),
        ("TOPICS__PARTITIONS", "0", ["from 1 to 1000"]),
        ("TOPICS__PARTITIONS", "1001", ["from 1 to 1000"]),
        ("TOPICS__PARTITIONS", "two", ["not a whole number"]),
        ("TOPICS__RETENTION", "1ms", ["out of bounds", "or 0: forever"]),
        ("LISTEN__TCP", "localhost", ["'localhost' is not HOST:PORT"]),
        ("LISTEN__TCP", "localhost:65536", ["is not HOST:PORT"]),
        ("LISTEN__TCP", ",", ["at least one"]),
        ("LISTEN__TCP", "localhost:1=fig", ["'fig' is not a protocol of a TCP address", "flymq, rustlog, blipmq, figg"]),
        ("LISTEN__TCP", "localhost:1=", ["'' is not a protocol"]),
        ("LISTEN__TCP", "figg", ["'figg' is not HOST:PORT"]),
        ("TLS__MINIMUM", "1.1", ['"1.2", "1.3"']),
        ("FLYMQ__ADVERTISE", "somewhere", ["HOST:PORT"]),
        ("LOGGING__LEVEL", "loud", ["logging.level", '"debug"']),
    ],
)
def test_a_bad_value_names_the_key_the_value_and_what_is_expected(variable: str, value: str, words: list[str]) -> None:
    text = start_error(environment={f"HEADRACE__{variable}": value})
    for word in [f"(environment HEADRACE__{variable})", "; expected ", *words]:
        assert word in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[storage]\nsegment_size = 1.5\n", ["storage.segment_size = 1.5", "not a size"]),
        ("[storage]\nsegment_size = true\n", ["not a size"]),
        ("[storage]\ncheckpoint_interval = 5\n", ["not a duration with a unit"]),
        ("[storage]\ncompress = 1\n", ["true or false"]),
        ("[storage]\nack = 3\n", ["storage.ack = 3"]),
        ("[topics]\npartitions = true\n", ["not a whole number"]),
        ("[listen]\ntcp = [1]\n", ["not a list of addresses"]),
        ("[listen]\ntcp = []\n", ["not a list of addresses"]),
        ("[storage.ack]\nx = 1\n", ["storage.ack = {'x': 1}"]),
        ("storage = 1\n", ["expected a section [storage]"]),
        ("[storage\n", ["at line 1"]),
        ('[storage]\npath = "a"\npath = "b"\n', ["at line 3"]),
    ],
)
def test_a_bad_file_is_rejected_in_one_line(write: Path, content: str, words: list[str]) -> None:
    write.write_text(content)
    text = start_error(file=write)
    for word in [str(write), *words]:
        assert word in text


def test_an_absent_file_a_directory_and_bytes_that_are_no_text_are_rejected(tmp_path: Path) -> None:
    assert start_error(file=tmp_path / "absent.toml").endswith("absent.toml: No such file or directory")
    assert start_error(file=tmp_path).endswith("Is a directory")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    assert start_error(file=tmp_path / "latin.toml").endswith("not UTF-8 (byte 5)")


def test_a_file_beyond_the_limit_is_not_read(write: Path) -> None:
    write.write_text("#" * (1 << 20))
    assert resolve(file=write).config == Config()
    write.write_text("#" * ((1 << 20) + 1))
    assert "larger than 1048576 bytes" in start_error(file=write)


def test_control_characters_and_long_values_do_not_reach_the_terminal() -> None:
    text = start_error(environment={"HEADRACE__STORAGE__ACK": "\x1b[31m" + "x" * 500})
    assert "\x1b" not in text
    assert len(text) < 300


def test_two_references_to_the_encryption_key_are_rejected() -> None:
    text = start_error(environment={"HEADRACE__STORAGE__KEY_FILE": "/key", "HEADRACE__STORAGE__KEY_ENV": "KEY"})
    assert text == "storage.key_file and storage.key_env are both set; expected one of them"


def test_protocols_behind_an_address_are_kept_apart_from_the_next_address(write: Path) -> None:
    wanted = (Bind(Address("127.0.0.1", 1), ("blipmq", "figg")), Bind(Address("::1", 2)), Bind(Address("h", 3), ("flymq",)))
    assert resolve(environment={"HEADRACE__LISTEN__TCP": "127.0.0.1:1=blipmq,figg, [::1]:2,h:3=flymq"}).config.listen.tcp == wanted
    write.write_text('[listen]\ntcp = ["127.0.0.1:1=blipmq,figg", "[::1]:2", "h:3=flymq"]\n')
    assert resolve(file=write).config.listen.tcp == wanted


@pytest.mark.parametrize("origin", ["flag", "environment"])
@pytest.mark.parametrize(
    ("name", "text", "wanted"),
    [
        ("fujin.readers", '["r=a+b;group=g", "s=c"]', ("r=a+b;group=g", "s=c")),
        ("fujin.readers", "['r=a+b;group=g', 's=c',]", ("r=a+b;group=g", "s=c")),
        ("fujin.readers", '"r=a"', ("r=a",)),
        ("fujin.readers", "[]", ()),
        ("fujin.readers", "r=a,s=c", ("r=a", "s=c")),
        ("listen.tcp", '["[::1]:0=figg,blipmq", "h:1"]', (Bind(Address("::1", 0), ("figg", "blipmq")), Bind(Address("h", 1)))),
        ("listen.tcp", "[::1]:0,h:1", (Bind(Address("::1", 0)), Bind(Address("h", 1)))),
        ("blipmq.keys", '["env:KEY"]', (SecretReference("env", "KEY"),)),
        ("storage.path", '"/with space"', Path("/with space")),
        ("storage.path", "[dir]", Path("[dir]")),
        ("storage.segment_size", '"1 MiB"', 1 << 20),
    ],
)
def test_a_flag_or_variable_may_be_written_as_in_toml_or_json(origin: str, name: str, text: str, wanted: object) -> None:
    if origin == "flag":
        resolved = resolve(flags={name: (f"--set {name}", text)})
    else:
        resolved = resolve(environment={SETTINGS[name].variable: text})
    assert resolved.value(name) == wanted


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("fujin.readers", '["r=a"', "neither plain text nor a TOML or JSON value"),
        ("fujin.readers", "[r=a]", "neither plain text nor a TOML or JSON value"),
        ("fujin.readers", '["r=a"]\nx = 1', "more than one value"),
        ("fujin.readers", "[1]", "not a list of texts"),
        ("storage.path", '"/half', "neither plain text nor a TOML or JSON value"),
        ("blipmq.keys", '["swordfish"]', "not a reference"),
    ],
)
def test_a_value_that_only_begins_like_toml_is_rejected(name: str, text: str, reason: str) -> None:
    error = start_error(flags={name: (f"--set {name}", text)})
    assert f"(flag --set {name}): {reason}; expected " in error
    assert "swordfish" not in error


def test_a_reference_to_a_secret_may_name_its_owner() -> None:
    keys = resolve(environment={"HEADRACE__BLIPMQ__KEYS": "env:KEY,alice=file:/keys/a=b"}).config.blipmq.keys
    assert keys == (SecretReference("env", "KEY"), SecretReference("file", "/keys/a=b", "alice"))


def test_a_secret_written_in_the_place_of_its_reference_is_not_repeated() -> None:
    text = start_error(environment={"HEADRACE__BLIPMQ__KEYS": "swordfish"})
    assert text.startswith("blipmq.keys (environment HEADRACE__BLIPMQ__KEYS): not a reference; expected")
    assert "swordfish" not in text


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"CERTIFICATE": "c"}, "tls.certificate and tls.key must be set together; only one of them is set"),
        ({"KEY": "k"}, "tls.certificate and tls.key must be set together; only one of them is set"),
        ({"CLIENT_CA": "a"}, "tls.client_ca is set without tls.certificate and tls.key"),
        ({"OPTIONAL": "true"}, "tls.optional is set without tls.certificate and tls.key"),
    ],
)
def test_half_a_tls_configuration_is_rejected(keys: dict[str, str], text: str) -> None:
    assert start_error(environment={f"HEADRACE__TLS__{key}": value for key, value in keys.items()}) == text


def test_explain_knows_every_key_and_names_the_nearest_to_others() -> None:
    assert all(explain(name) is known for name, known in SETTINGS.items())
    with pytest.raises(ConfigError, match=r"unknown key storage\.akc; did you mean storage\.ack\?"):
        explain("storage.akc")


@pytest.mark.parametrize("text", ["127.0.0.1:0", "localhost:9092", "[::1]:65535", "a-b.example:1"])
def test_an_address_is_written_as_it_was_read(text: str) -> None:
    assert str(Address.parse(text)) == text


@pytest.mark.parametrize("text", ["", ":1", "host", "host:", "host:-1", "host:65536", "::1:80", "[::1]", "a b:1", "host:1:2", "host:٣"])
def test_what_is_no_address_is_rejected(text: str) -> None:
    with pytest.raises(ValueError):
        Address.parse(text)


def test_relative_paths_of_a_file_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "headrace.toml"
    file.parent.mkdir()
    file.write_text(
        '[storage]\npath = "data"\nkey_file = "/keys/storage.key"\n[tls]\ncertificate = "certs/server.pem"\nkey = "certs/server.key"\n'
        '[blipmq]\nkeys = ["file:blip.key", "ann=env:KEY"]\n'
    )
    config = resolve(file=file).config
    assert config.storage.path == tmp_path / "etc" / "data"
    assert config.storage.key_file == "/keys/storage.key"
    assert config.tls.certificate == str(tmp_path / "etc" / "certs" / "server.pem")
    assert [str(key) for key in config.blipmq.keys] == [f"file:{tmp_path / 'etc' / 'blip.key'}", "ann=env:KEY"]
    assert resolve(flags={"storage.path": ("--data", "data")}).config.storage.path == Path("data")
