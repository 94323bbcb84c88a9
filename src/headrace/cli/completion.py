"""`headrace completion`: completion scripts for shells."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import ShellComplete, get_completion_class

_VARIABLE: Final = "_HEADRACE_COMPLETE"
"""Environment variable that the scripts set; click then prints completions instead of running the command."""


@click.command(
    epilog="""\b
bash   eval "$(headrace completion bash)"     in ~/.bashrc
zsh    eval "$(headrace completion zsh)"      in ~/.zshrc, after compinit
fish   headrace completion fish > ~/.config/fish/completions/headrace.fish
"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell.

    It completes commands, options and option values.
    """
    from headrace.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    # Only the script: click would also start bash to check its version.
    click.echo(ShellComplete.source(kind(cli, {}, "headrace", _VARIABLE)))
