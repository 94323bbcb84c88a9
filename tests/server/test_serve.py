"""`headrace serve`: start, banner, drain, and errors of one line."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from headrace.storage.batch import CHECKSUMS_IN_C
from tests.canaries import ENCRYPTION_KEY
from tests.server.process import BrokerProcess, start_error


@pytest.mark.parametrize("uvloop", [True, False], ids=["uvloop", "asyncio"])
def test_the_ready_file_names_the_process_and_protocols_that_are_open(tmp_path: Path, uvloop: bool) -> None:
    with BrokerProcess(tmp_path, "--listen", "127.0.0.1:0", "--listen", "127.0.0.1:0", uvloop=uvloop) as broker:
        assert broker.ready["pid"] == broker.process.pid
        assert len(set(broker.addresses)) == 2
        for address in broker.addresses:
            socket.create_connection(address, timeout=300).close()
        code, _, _ = broker.stop()
        assert code == 0
        assert not broker.ready_file.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_exits_with_0(tmp_path: Path, number: signal.Signals) -> None:
    with BrokerProcess(tmp_path) as broker:
        code, _, errors = broker.stop(number)
    assert code == 0
    assert f"signal received  signal={number.name}" in errors
    assert errors.rstrip().endswith("stopped")


def test_a_second_signal_exits_at_once(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--set", "limits.drain_timeout=1h") as broker:
        with socket.create_connection(broker.addresses[0], timeout=300) as peer:
            hold_open(peer)
            broker.process.send_signal(signal.SIGTERM)
            wait_for_line(broker, "draining")
            code, _, _ = broker.stop()  # with a deadline far below the hour of the drain
            assert code == 128 + signal.SIGTERM
        assert not broker.ready_file.exists()


def hold_open(peer: socket.socket) -> None:
    """Open a session: a drain waits until the client closes too."""
    from headrace.wire.figg import encode

    peer.sendall(encode.ping(1))
    assert peer.recv(64)


def wait_for_line(broker: BrokerProcess, word: str) -> None:
    assert broker.process.stderr is not None
    for line in broker.process.stderr:
        if word in line:
            return
    raise AssertionError(f"ended without saying {word!r}")


def test_a_duration_ends_by_itself_with_0(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--duration", "0.2") as broker:
        code, out, _ = broker.ended()
    assert code == 0
    assert "ready in" in out


def test_the_banner_tells_data_promise_and_protocols(tmp_path: Path) -> None:
    with BrokerProcess(
        tmp_path, "--listen", "127.0.0.1:0", "--listen", "127.0.0.1:0=figg", "--listen", "127.0.0.1:0=figg,blipmq"
    ) as broker:
        ports = [port for _, port in broker.addresses]
        _, out, _ = broker.stop()
    first, *lines, key, last = out.splitlines()
    listeners = [line for line in lines if line.startswith("  tcp ")]
    assert f"data={tmp_path / 'data'}" in first
    assert "ack=durable (fdatasync before every acknowledgement)" in first
    protocols = ["flymq rustlog blipmq figg", "figg", "blipmq figg"]
    assert [" ".join(listener.split()) for listener in listeners] == [
        f"tcp 127.0.0.1:{port} {names}" for port, names in zip(ports, protocols, strict=True)
    ]
    assert f"generated a BlipMQ API key, shown this once and stored in {tmp_path / 'data' / 'blipmq.key'}:" in key
    assert last.startswith("ready in ")


def test_log_lines_are_json_when_asked(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, HEADRACE__LOGGING__FORMAT="json") as broker:
        _, _, errors = broker.stop()
    messages = [json.loads(line)["message"] for line in errors.splitlines()]
    assert messages[-1] == "stopped"
    assert "ready" in messages


def test_flags_win_over_the_environment_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('[storage]\nack = "none"\npath = "file"\n[logging]\nformat = "json"\n')
    with BrokerProcess(tmp_path, "--config", str(file), "--set", "logging.format=text", HEADRACE__STORAGE__ACK="written") as broker:
        _, out, errors = broker.stop()
    assert "ack=written" in out
    assert f"data={tmp_path / 'data'}" in out
    assert not errors.startswith("{")


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        text = start_error(tmp_path, "--listen", "127.0.0.1:0", "--listen", address)
    assert text == f"cannot listen on {address}: the port is taken by another process; --listen chooses another"


def test_a_data_directory_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        assert start_error(tmp_path) == f"data directory {broker.data} is in use by process {broker.process.pid}"
        socket.create_connection(broker.addresses[0], timeout=300).close()
        assert broker.stop()[0] == 0
    with BrokerProcess(tmp_path) as again:
        assert again.stop()[0] == 0


def test_a_data_directory_is_free_again_after_a_kill(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        broker.process.kill()
        broker.ended()
    with BrokerProcess(tmp_path) as again:
        assert again.stop()[0] == 0


@pytest.mark.parametrize("below", ["a file", "a file/below"])
def test_a_data_directory_that_cannot_be_is_one_clear_line(tmp_path: Path, below: str) -> None:
    (tmp_path / "a file").write_text("")
    text = start_error(tmp_path, "--data", str(tmp_path / below))
    assert text.startswith(f"data directory {tmp_path / below}: ")


def test_an_unwritable_data_directory_is_one_clear_line(tmp_path: Path) -> None:
    # A directory of the kernel: not even root may create files there.
    assert start_error(tmp_path, "--data", "/proc/self/task").startswith("data directory /proc/self/task: ")


def test_a_bad_key_names_the_nearest_valid_one(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text('[storage]\nakc = "durable"\n')
    assert start_error(tmp_path, "--config", str(file)) == f'{file}: unknown key "storage.akc"; did you mean storage.ack?'
    assert start_error(tmp_path, "--set", "storage.akc=none") == "unknown key storage.akc; did you mean storage.ack?"
    variable = start_error(tmp_path, HEADRACE__STORAGE__AKC="none")
    assert variable == 'unknown environment variable "HEADRACE__STORAGE__AKC"; did you mean HEADRACE__STORAGE__ACK?'


def test_an_address_beyond_loopback_needs_tls_or_insecure(tmp_path: Path) -> None:
    text = start_error(tmp_path, "--listen", "0.0.0.0:0")
    assert text == (
        "0.0.0.0:0 can be reached from the network, and nothing is encrypted: set tls.certificate and tls.key, "
        "or add --insecure to allow it"
    )
    with BrokerProcess(tmp_path, "--listen", "0.0.0.0:0", "--insecure") as broker:
        socket.create_connection(("127.0.0.1", broker.addresses[0][1]), timeout=300).close()


def test_a_ready_file_that_cannot_be_written_stops_the_start(tmp_path: Path) -> None:
    text = start_error(tmp_path, "--ready-file", str(tmp_path / "absent" / "ready"))
    assert text == f"--ready-file {tmp_path / 'absent' / 'ready'}: No such file or directory"


def test_a_wrong_key_prevents_the_start(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--set", "storage.key_env=KEY", KEY=ENCRYPTION_KEY.hex()) as broker:
        assert broker.stop()[0] == 0
    for key in ("22" * 32, None):
        arguments = [] if key is None else ["--set", "storage.key_env=KEY"]
        text = start_error(tmp_path, *arguments, **({} if key is None else {"KEY": key}))
        assert text.startswith(f"data directory {tmp_path / 'data'}: ")
        assert "22" * 32 not in text
    with BrokerProcess(tmp_path, "--set", "storage.key_env=KEY", KEY=ENCRYPTION_KEY.hex()) as again:
        assert again.stop()[0] == 0


def test_the_limit_of_open_files_is_raised_to_what_is_allowed(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        limits = Path(f"/proc/{broker.process.pid}/limits").read_text()
    [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
    soft, hard = line.split()[3:5]
    assert soft == hard


def test_checksums_in_python_are_warned_of(tmp_path: Path) -> None:
    without_extension = "import sys; sys.modules['google_crc32c.cext'] = None; from headrace.cli import main; main()"
    with BrokerProcess(tmp_path, code=without_extension) as broker:
        code, _, errors = broker.stop()
    assert code == 0
    assert "checksums are slow" in errors


def test_checksums_in_c_are_not_worth_a_word(tmp_path: Path) -> None:
    assert CHECKSUMS_IN_C, "without it, no figure of this machine means anything"
    with BrokerProcess(tmp_path) as broker:
        _, _, errors = broker.stop()
    assert "checksums" not in errors
