"""The documentation matches the code: generated pages are current, every option is documented, every link works."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from headrace.cli.reference import PAGES, commands
from headrace.server.config import SETTINGS

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
PROSE = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (DOCS / "reference" / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("path, command", [pytest.param(path, command, id=path) for path, command in commands()])
def test_every_command_and_option_is_documented(path: str, command: click.Command) -> None:
    assert command.help, f"{path} has no help"
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            assert parameter.help, f"{path} {parameter.opts[0]} has no help"


@pytest.mark.parametrize("name", SETTINGS)
def test_every_key_is_explained_in_sentences(name: str) -> None:
    text = SETTINGS[name].text
    assert text.endswith(".")
    assert len(text) > 20


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_inside_the_documentation_works(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_flag_in_a_headrace_line_of_the_documentation_exists(page: Path) -> None:
    known = {
        path: {flag for parameter in command.params for flag in [*parameter.opts, *parameter.secondary_opts]}
        for path, command in commands()
    }
    for line in re.findall(r"^\s*(?:\$ )?(headrace [a-z].*)$", page.read_text(encoding="utf-8"), re.MULTILINE):
        words = line.split("#")[0].split("|")[0].split()
        path = next((" ".join(words[:length]) for length in (3, 2) if " ".join(words[:length]) in known), None)
        assert path is not None, f"{page.relative_to(ROOT)}: no command in {line!r}"
        for word in words:
            if re.fullmatch(r"--?[a-z][a-z-]*", word):
                assert word in known[path] | {"--help", "-h"}, f"{page.relative_to(ROOT)}: {path} has no {word}"


NAMED_FILES = sorted(set(re.findall(r"`([\w/]+\.py|[\w/]+/)`", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))))


@pytest.mark.parametrize("name", NAMED_FILES)
def test_every_file_that_the_architecture_names_exists(name: str) -> None:
    # A file may be named relative to a directory mentioned before it.
    found = [path for base in ("src/headrace", "tests") for path in (ROOT / base).glob(f"**/{name.rstrip('/')}")]
    assert found or (ROOT / name).exists()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150


def test_every_core_dependency_has_its_decision() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    written = "\n".join(page.read_text(encoding="utf-8") for page in (DOCS / "decisions").glob("*.md"))
    for requirement in project["dependencies"]:
        name = re.split(r"[><=;\s\[]", requirement)[0]
        assert f"`{name}`" in written, f"no page in docs/decisions names `{name}`"


def test_the_constraints_hold_names_and_versions_only() -> None:
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line), line


def test_the_changelog_names_the_version_of_the_package() -> None:
    from headrace import __version__

    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{__version__}]" in changelog or "## [Unreleased]" in changelog
