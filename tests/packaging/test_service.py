"""The container image, the systemd unit and their configurations name only what exists, and what they start works."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from headrace.cli.reference import commands
from headrace.errors import ConfigError
from headrace.server.addresses import require_caution
from headrace.server.config import Config
from headrace.server.config_sources import resolve
from tests.server.process import BrokerProcess

ROOT = Path(__file__).parent.parent.parent
PACKAGING = ROOT / "packaging"
LOOPBACK, NETWORK, UNIT, CONTAINERFILE = (
    PACKAGING / "headrace.toml",
    PACKAGING / "headrace-network.toml",
    PACKAGING / "headrace.service",
    ROOT / "Containerfile",
)


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]  # systemd tells upper from lower case
    parser.read(UNIT, encoding="utf-8")
    return parser


def instructions() -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest) of the Containerfile, with continued lines joined."""
    text = re.sub(r"^#.*\n", "", CONTAINERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def of(instruction: str) -> list[str]:
    return [rest for word, rest in instructions() if word == instruction]


def environment() -> dict[str, str]:
    return dict(word.split("=", 1) for rest in of("ENV") for word in rest.split())


def check_command(words: list[str]) -> None:
    """`words` follow `headrace`: the command and all its options must exist."""
    known = dict(commands())
    command = known[f"headrace {words[0]}"]
    flags = {flag for parameter in command.params if isinstance(parameter, click.Option) for flag in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= flags


def configured(file: Path) -> Config:
    return resolve(file=file, environment={}, flags={}).config


def test_the_unit_starts_a_command_with_options_that_exist() -> None:
    program, *words = shlex.split(unit()["Service"]["ExecStart"])
    assert Path(program).name == "headrace"
    check_command(words)
    assert words[words.index("--config") + 1] == "/etc/headrace/headrace.toml"


def test_the_unit_is_hardened_and_keeps_its_data_where_the_configuration_says() -> None:
    service = unit()["Service"]
    assert (service["Type"], service["DynamicUser"], service["ProtectSystem"], service["NoNewPrivileges"]) == (
        "notify",
        "yes",
        "strict",
        "yes",
    )
    assert int(service["LimitNOFILE"]) >= 65536
    assert service["Restart"] == "on-failure"
    assert configured(LOOPBACK).storage.path == configured(NETWORK).storage.path == Path("/var/lib") / service["StateDirectory"]


def test_the_unit_names_files_and_extras_of_this_project() -> None:
    text = UNIT.read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for file in re.findall(r"packaging/[\w.-]+", text + CONTAINERFILE.read_text(encoding="utf-8")):
        assert (ROOT / file).is_file(), file
    for listed in re.findall(r"(?:headrace|'\.)\[([\w,]+)\]", text + CONTAINERFILE.read_text(encoding="utf-8")):
        assert set(listed.split(",")) <= set(extras)


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """Where systemd is not installed, the structure is all that can be checked."""
    assert set(unit().sections()) == {"Unit", "Service", "Install"}
    if analyze := shutil.which("systemd-analyze"):
        program = shlex.split(unit()["Service"]["ExecStart"])[0]
        made = tmp_path / "headrace.service"
        # The program has to exist where the unit is checked.
        made.write_text(UNIT.read_text(encoding="utf-8").replace(program, "/bin/true"))
        done = subprocess.run([analyze, "verify", "--man=no", str(made)], capture_output=True, text=True, timeout=120, check=False)
        complaints = [line for line in done.stderr.splitlines() if "headrace.service" in line]
        assert (done.returncode, complaints) == (0, []), done.stderr


def test_the_image_is_built_in_stages_and_runs_as_an_ordinary_user() -> None:
    words = [word for word, _ in instructions()]
    assert words.count("FROM") == 2
    assert "FROM" not in words[words.index("USER") :]
    [user] = of("USER")
    assert int(user) > 0
    assert any(f"--uid {user} " in rest for rest in of("RUN"))


def test_the_image_copies_files_that_exist_and_are_not_ignored() -> None:
    kept = {line[1:] for line in (ROOT / ".containerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")}
    for rest in of("COPY"):
        *sources, _ = [word for word in rest.split() if not word.startswith("--")]
        for source in sources if "--from" not in rest else []:
            assert (ROOT / source).exists(), source
            assert Path(source).parts[0] in kept, source


def test_the_image_runs_commands_with_options_that_exist() -> None:
    [entry], [command], [health] = of("ENTRYPOINT"), of("CMD"), of("HEALTHCHECK")
    assert json.loads(entry) == ["headrace"]
    check_command(json.loads(command))
    program, *words = json.loads(health.partition("CMD ")[2])
    assert program == "headrace"
    check_command(words)


def test_the_image_keeps_data_and_configuration_where_its_files_say() -> None:
    [volume] = of("VOLUME")
    assert configured(LOOPBACK).storage.path == configured(NETWORK).storage.path == Path(volume)
    assert any(rest.split()[-1] == environment()["HEADRACE_CONFIG"] for rest in of("COPY"))


@pytest.mark.parametrize("file", [LOOPBACK, NETWORK], ids=lambda path: path.name)
def test_a_configuration_opens_every_protocol_on_the_ports_that_the_image_exposes(file: Path) -> None:
    listen = configured(file).listen
    ports = {f"{bind.address.port}/tcp" for bind in (*listen.tcp, *listen.flight)} | {f"{bind.address.port}/udp" for bind in listen.quic}
    assert ports == set(of("EXPOSE")[0].split())
    assert listen.quic and listen.flight
    assert environment()["HEADRACE_SERVER"].rpartition(":")[2] in {str(bind.address.port) for bind in listen.tcp if not bind.protocols}


@pytest.mark.parametrize("file", [LOOPBACK, NETWORK], ids=lambda path: path.name)
def test_a_configuration_needs_no_insecure_flag(file: Path) -> None:
    require_caution(configured(file))


def test_the_network_configuration_is_refused_when_its_protection_is_taken_away(tmp_path: Path) -> None:
    text = NETWORK.read_text(encoding="utf-8")
    for line in ("client_ca", "mode"):
        weaker = tmp_path / f"without-{line}.toml"
        weaker.write_text(re.sub(rf"^{line} = .*\n", "", text, flags=re.MULTILINE))
        with pytest.raises(ConfigError, match="can be reached from the network"):
            require_caution(configured(weaker))


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "headrace", *arguments], capture_output=True, text=True, timeout=120, check=False)


def test_a_broker_with_the_network_configuration_starts_and_passes_the_health_check(tmp_path: Path) -> None:
    certs = tmp_path / "certs"
    assert headrace("certs", "init", str(certs), "--name", "localhost").returncode == 0
    text = (
        NETWORK.read_text(encoding="utf-8").replace("/etc/headrace/certs", str(certs)).replace("/var/lib/headrace", str(tmp_path / "data"))
    )
    text = re.sub(r"0\.0\.0\.0:\d+", "127.0.0.1:0", text)
    file = tmp_path / "headrace.toml"
    file.write_text(text)
    with BrokerProcess(tmp_path, "--config", str(file), "--listen-quic", "127.0.0.1:0", "--listen-flight", "127.0.0.1:0") as broker:
        protocols = broker.ready["protocols"]
        assert isinstance(protocols, dict) and {"tcp", "quic", "flight"} <= set(protocols)
        [health] = of("HEALTHCHECK")
        words = json.loads(health.partition("CMD ")[2])[1:]
        done = headrace(*words, "--server", protocols["tcp"][0])
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        assert broker.stop(signal.SIGTERM)[0] == 0


def test_the_broker_reports_ready_and_stopping_to_its_supervisor(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.settimeout(300)
        with BrokerProcess(tmp_path, NOTIFY_SOCKET=str(tmp_path / "notify")) as broker:
            assert supervisor.recv(100) == b"READY=1"
            assert broker.ready_file.exists()
            assert broker.stop(signal.SIGTERM)[0] == 0
            assert supervisor.recv(100) == b"STOPPING=1"
