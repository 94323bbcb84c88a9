"""Shell completion: the script and its completions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import COMMANDS

PROGRAM = str(Path(sys.executable).parent)


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{PROGRAM}:{os.environ['PATH']}", "LC_ALL": "C", **more}


def script(shell: str) -> str:
    done = subprocess.run(["headrace", "completion", shell], capture_output=True, text=True, timeout=300, check=True, env=environment())
    assert done.stderr == ""
    return done.stdout


def completed(*words: str) -> list[str]:
    """Return the completions of bash after the last word."""
    line = " ".join(f"'{word}'" for word in words)
    press = f'COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _headrace_completion headrace; printf "%s\\n" "${{COMPREPLY[@]}}"'
    load = 'eval "$(headrace completion bash)"; complete -p headrace >&2'
    done = subprocess.run(
        ["bash", "--norc", "-c", f"{load}; {press}"], capture_output=True, text=True, timeout=300, check=True, env=environment()
    )
    assert "-F _headrace_completion headrace" in done.stderr, "the script does not register itself"
    return done.stdout.split()


def test_bash_completes_commands_by_their_beginning() -> None:
    assert completed("headrace", "co") == ["console", "context", "config", "copy", "completion"]
    assert completed("headrace", "") == list(COMMANDS)
    assert completed("headrace", "no-such") == []


def test_bash_completes_commands_of_a_group_options_and_their_values() -> None:
    assert completed("headrace", "topic", "d") == ["delete", "describe"]
    assert "--partitions" in completed("headrace", "topic", "create", "--part")
    assert completed("headrace", "topic", "list", "-o", "js") == ["json", "jsonl"]
    assert completed("headrace", "pub", "t", "--protocol", "f") == ["figg", "flymq", "fujin"]


def test_the_names_of_commands_are_completed_without_importing_them() -> None:
    ask = "import sys; from headrace.cli import cli; from click import Context; cli.shell_complete(Context(cli), ''); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, timeout=300, check=True)
    loaded = [
        name for name in done.stdout.split() if name.startswith("headrace.") and name.split(".")[1] not in ("cli", "errors", "extras")
    ]
    assert loaded == []


@pytest.mark.parametrize(("shell", "begins"), [("zsh", "#compdef headrace"), ("fish", "function _headrace_completion;")])
def test_other_shells_get_their_own_script(shell: str, begins: str) -> None:
    written = script(shell)
    assert written.startswith(begins)
    assert f"_HEADRACE_COMPLETE={shell}_complete" in written
    if (program := shutil.which(shell)) is not None:
        subprocess.run([program, "-n"], input=written, text=True, timeout=300, check=True)


def test_an_unknown_shell_is_wrong_usage() -> None:
    done = subprocess.run(["headrace", "completion", "tcsh"], capture_output=True, text=True, timeout=300, check=False, env=environment())
    assert done.returncode == 2
    assert "'bash', 'zsh', 'fish'" in done.stderr
