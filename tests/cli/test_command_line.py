"""The command line as a real process: streams and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace import __version__
from headrace.cli import COMMANDS, EXIT_CODES, REFUSED, exit_code, load
from headrace.clients.errors import RefusedRepeatedly
from headrace.compiled import is_compiled
from headrace.server.config import SETTINGS


def headrace(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace", *arguments],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", **environment},
        timeout=300,
        check=False,
    )


def one_error_line(done: subprocess.CompletedProcess[str]) -> str:
    assert done.stdout == ""
    assert done.stderr.startswith("headrace: ")
    assert done.stderr.count("\n") == 1
    return done.stderr.removeprefix("headrace: ").rstrip("\n")


def test_help_lists_every_command_with_its_own_text() -> None:
    done = headrace("--help")
    assert done.returncode == 0
    for name, entry in COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert entry.text in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_line_of_a_command_is_the_first_of_its_own_help(name: str) -> None:
    command = load(COMMANDS[name])
    assert command.name == name
    assert command.get_short_help_str(limit=200).rstrip(".") == COMMANDS[name].text.rstrip(".")


def test_help_imports_nothing_heavy() -> None:
    script = "import sys; from headrace.cli import cli; cli.main(['--help'], standalone_mode=False); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    loaded = set(done.stderr.split())
    assert "click" in loaded
    heavy = {
        "asyncio",
        "rich",
        "msgspec",
        "uvloop",
        "cryptography",
        "google_crc32c",
        "headrace.server.config",
        "headrace.storage.batch",
        "ssl",
    }
    assert loaded & heavy == set()


def test_an_unknown_command_is_wrong_usage_and_names_the_nearest() -> None:
    done = headrace("srve")
    assert one_error_line(done) == "unknown command 'srve'; did you mean serve? (see headrace --help)"
    assert done.returncode == 2
    assert one_error_line(headrace("xyzzy")) == "unknown command 'xyzzy' (see headrace --help)"


def test_an_unknown_option_is_wrong_usage() -> None:
    done = headrace("version", "--loud")
    assert "(see headrace version --help)" in one_error_line(done)
    assert done.returncode == 2


def test_without_a_command_the_help_is_shown() -> None:
    done = headrace()
    assert "Commands:" in done.stdout + done.stderr
    assert done.returncode in (0, 2)


@pytest.mark.parametrize("arguments", [("--version",), ("version",)])
def test_the_version_is_that_of_the_package(arguments: tuple[str, ...]) -> None:
    done = headrace(*arguments)
    assert done.returncode == 0
    assert done.stdout.splitlines()[0] == f"headrace {__version__}"


def test_the_version_as_json_names_what_it_runs_on() -> None:
    facts = json.loads(headrace("version", "-o", "json").stdout)
    assert facts["headrace"] == __version__
    assert facts["python"].startswith("3.")
    assert facts["google-crc32c"] != "absent"
    assert facts["modules"] == ("compiled" if is_compiled() else "pure Python")
    assert {"pyarrow", "pyspark", "java"} <= facts.keys()


def test_a_defect_is_one_line_unless_the_traceback_is_requested() -> None:
    script = (
        "import headrace.cli as c, types, sys\n"
        "m = types.ModuleType('planted')\n"
        "import click\n"
        "@click.command()\n"
        "def boom(): raise RuntimeError('line one\\nline two \\x1b[31m')\n"
        "m.boom = boom; sys.modules['planted'] = m\n"
        "c.COMMANDS['boom'] = c.Entry('planted', 'boom', '')\n"
        "c.main(['boom'])\n"
    )

    def run(**environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script]
        return subprocess.run(
            command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **environment}, timeout=300, check=False
        )

    quiet = run()
    assert quiet.returncode == 1
    assert one_error_line(quiet) == "internal error: RuntimeError: line one\\nline two \\x1b[31m (HEADRACE_TRACEBACK=1 shows where)"
    loud = run(HEADRACE_TRACEBACK="1")
    assert loud.returncode == 1
    assert "Traceback" in loud.stderr


def test_a_command_whose_library_is_absent_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.cli import Entry
    from headrace.extras import MissingExtra

    monkeypatch.setitem(sys.modules, "hdrh", None)
    with pytest.raises(MissingExtra, match=r"headrace bench needs hdrhistogram: pip install 'headrace\[bench\]'"):
        load(Entry("hdrh", "bench", ""))


def test_a_reader_that_goes_away_is_no_news() -> None:
    shell = f"{sys.executable} -m headrace config explain | head -n 1; echo ${{PIPESTATUS[0]}}"
    environment = {"PATH": "/usr/bin:/bin"}  # without a locale, which may not be installed: bash would warn
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=environment, timeout=300, check=True)
    first, status = done.stdout.splitlines()
    assert first.startswith("storage.")
    assert (status, done.stderr) == ("0", "")


def test_config_check_accepts_a_good_file_and_counts_its_keys(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('[storage]\nack = "written"\n[topics]\npartitions = 4\n')
    done = headrace("config", "check", str(file), HEADRACE__STORAGE__ACK="nonsense, but not of this file")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{file}: ok, 2 of {len(SETTINGS)} keys set\n"


def test_config_check_reports_every_mistake_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text(
        '[storage]\nakc = 1\n# a comment = 1\npath = "data"\nkey_file = "no.key"\n\n[tls]\ncertificate = "certs/server.pem"\n'
        'optional = 3\n[topcs]\npartitions = 1\n[limits]\nconnections = 0\n[blipmq]\nkeys = [\n  "file:blip.key",\n]\n'
    )
    (tmp_path / "no.key").mkdir()
    done = headrace("config", "check", str(file))
    assert (done.returncode, done.stdout) == (1, "")
    assert [line.removeprefix(f"headrace: {file}:") for line in done.stderr.splitlines()] == [
        '2: unknown key "storage.akc"; did you mean storage.ack?',
        f"5: storage.key_file: {tmp_path / 'no.key'} is not a file",
        "8: tls.certificate and tls.key must be set together; only one of them is set",
        f"8: tls.certificate: the file {tmp_path / 'certs' / 'server.pem'} does not exist",
        "9: tls.optional = 3: neither true nor false; expected true or false",
        '10: unknown section "topcs"; did you mean topics?',
        "13: limits.connections = 0: out of bounds; expected a whole number from 1 to 1000000",
        f"15: blipmq.keys: the file {tmp_path / 'blip.key'} does not exist",
    ]


def test_config_check_reports_the_line_of_a_syntax_error(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[storage]\nack = \n")
    assert one_error_line(headrace("config", "check", str(file))) == f"{file}:2: Invalid value"
    assert one_error_line(headrace("config", "check", str(tmp_path / "none"))) == f"{tmp_path / 'none'}: No such file or directory"


def test_config_check_never_repeats_a_secret(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('[blipmq]\nkeys = ["a-real-key"]\n')
    assert "a-real-key" not in headrace("config", "check", str(file)).stderr


def test_config_show_tells_values_and_origins(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('[storage]\nsegment_size = "1 MiB"\n')
    done = headrace("config", "show", "--config", str(file), "-o", "json", HEADRACE__LOGGING__LEVEL="debug")
    rows = json.loads(done.stdout)
    assert set(rows) == set(SETTINGS)
    assert rows["storage.segment_size"] == {"value": "1 MiB", "origin": f"file {file}"}
    assert rows["logging.level"] == {"value": "debug", "origin": "environment HEADRACE__LOGGING__LEVEL"}
    assert rows["storage.ack"] == {"value": "durable", "origin": "default"}


def test_config_show_as_a_table_names_each_key() -> None:
    done = headrace("config", "show", COLUMNS="200")
    assert done.returncode == 0
    for name in SETTINGS:
        assert f"{name} " in done.stdout


def test_config_show_as_toml_is_a_file_that_config_check_accepts(tmp_path: Path) -> None:
    file = tmp_path / "shown.toml"
    file.write_text(headrace("config", "show", "-o", "toml").stdout)
    assert set(tomllib.loads(file.read_text())) == {name.partition(".")[0] for name in SETTINGS}
    assert headrace("config", "check", str(file)).returncode == 0


def test_config_explain_tells_text_default_bounds_and_variable() -> None:
    done = headrace("config", "explain", "storage.segment_size")
    assert done.returncode == 0
    for word in ["storage.segment_size", '"128 MiB"', "64 KiB to 4 GiB", "HEADRACE__STORAGE__SEGMENT_SIZE", "deletes whole segments"]:
        assert word in done.stdout


def test_config_explain_without_a_key_lists_all() -> None:
    lines = headrace("config", "explain").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(SETTINGS)


def test_doctor_exits_with_1_if_something_needs_action(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[storage]\nakc = 1\n")
    done = headrace("doctor", "--config", str(file), "--data", str(tmp_path / "data"), "-q")
    assert done.returncode == 1
    assert done.stdout.startswith("action configuration") and f"{file}:2: unknown key" in done.stdout
    rows = json.loads(headrace("doctor", "--config", str(file), "-o", "json").stdout)
    assert rows[0]["level"] == "action" and rows[0]["advice"] == "correct the file"


def test_a_broker_that_closes_every_connection_has_an_exit_code_of_its_own() -> None:
    assert exit_code(RefusedRepeatedly(host="h", port=1, count=10, reason="closed")) == REFUSED
    assert list(EXIT_CODES) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 130]
