"""Retired words do not come back: one list for sources, documentation, help and error texts.

`python -m tests.docs.test_words` prints every hit as file:line. Python files are searched by token: identifiers (split at underscores and
capital letters), comments and strings. The help pages of the command line are in docs/reference, which a test keeps up to date.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
PYTHON = ("src/**/*.py", "benchmarks/*.py")
TEXT = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/**/*.md", "Makefile", "tools/*", ".ci/run")

RETIRED = {
    "door, doors": "protocol, listener",
    "bulk lane, lane, lanes": "Flight endpoint, connection, partition progress",
    "station, stations": "layer, package",
    "house, houses": "server",
    "visitor, visitors": "peer",
    "hearer, hearers": "receiver",
    "gate, gates": "authorizer",
    "witness, witnesses": "audit hook",
    "surroundings": "context",
    "piece, pieces": "chunk",
    "app, apps": "writer",
    "edition, editions": "version",
    "verb, verbs": "handler, request, method, operation",
    "refusal, refusals": "error",
    "story, stories": "demo",
    "reckoning": "verification",
    "teller, desk, scene, plot": "the name of the thing",
    "run id, run ids": "epoch, execution",
    "anew": "again",
    "whoever": "a caller, a client, a user",
    "nobody": "no client, no user",
    "sought": "searched, retried",
    "behind the last": "after the last",
}
"""Retired words and phrases, and the words to use."""

RETIRED_IDENTIFIERS = {"share, shares": "group consumer, fraction", "Run": "RecordBatch, Epoch, Execution"}
"""Retired as a part of identifiers only: prose may say that two readers share a file. `Run` is retired as the last part of a class name."""

LEGITIMATE = {
    "txnAppId": "an option of Delta Lake's writer in Spark",
    "spark.app.": "a setting of Spark",
    "appName": "a method of Spark's session builder",
    "app_name": "the name of a Spark application",
    "app_metadata": "a field of Arrow Flight's messages",
    "app_transactions": "an argument of deltalake",
    "ASGIApp": "the type of an application in Starlette",
    "runId": "a field of Spark's query progress",
    "run id of the query": "the same in prose",
    "query id, run id and batch id": "the same in prose",
    "begins with a verb": "a word of grammar",
}
"""A hit is ignored on a line that contains one of these."""

INTERROGATIVES = ("What", "How", "Who", "Whom", "Whose", "Which", "Whoever")

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")
_ESCAPE = re.compile(r"\\[nrt]")
_STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


class Text(NamedTuple):
    """A part of a file, and the line on which it begins."""

    line: int
    text: str
    is_identifier: bool = False


class Hit(NamedTuple):
    path: str
    line: int
    problem: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.problem}"


def _phrases(words: dict[str, str]) -> dict[tuple[str, ...], str]:
    return {tuple(phrase.lower().split()): instead for phrases, instead in words.items() for phrase in phrases.split(", ")}


_ANYWHERE = _phrases(RETIRED)
_IN_IDENTIFIERS = _ANYWHERE | _phrases({words: instead for words, instead in RETIRED_IDENTIFIERS.items() if words != "Run"})


_FIRST_WORDS = {phrase[0] for phrase in _IN_IDENTIFIERS}


def texts_of(path: Path, source: str) -> Iterator[Text]:
    """Yield the searched parts of a file: identifiers, comments and strings of Python, every line of other files."""
    if path.suffix != ".py":
        yield from (Text(number, line) for number, line in enumerate(source.splitlines(), 1))
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NAME:
            yield Text(token.start[0], token.string, is_identifier=True)
        elif token.type == tokenize.COMMENT or token.type in _STRINGS:
            yield Text(token.start[0], _ESCAPE.sub("  ", token.string))


def words_of(text: Text) -> list[tuple[int, str]]:
    """Split at everything but letters, at underscores and at capital letters; each word with its line."""
    found = []
    line, position = text.line, 0
    for match in _WORD.finditer(text.text):
        line += text.text.count("\n", position, match.start())
        position = match.start()
        found.append((line, match[0].lower()))
    return found


def retired_words(path: Path, source: str, shown: str) -> Iterator[Hit]:
    """Find the retired words of one file."""
    lines = source.splitlines()
    for text in texts_of(path, source):
        words = words_of(text)
        retired = _IN_IDENTIFIERS if text.is_identifier else _ANYWHERE
        for index, (line, word) in enumerate(words):
            if word not in _FIRST_WORDS:
                continue
            for length in (1, 2, 3):
                phrase = tuple(following for _, following in words[index : index + length])
                if len(phrase) == length and phrase in retired and not any(part in lines[line - 1] for part in LEGITIMATE):
                    yield Hit(shown, line, f"{' '.join(phrase)!r} is retired; use: {retired[phrase]}")
        if text.is_identifier and re.search(r"(^|[a-z])Runs?$", text.text) and not any(part in text.text for part in LEGITIMATE):
            yield Hit(shown, text.line, f"{text.text!r} ends with Run; use: {RETIRED_IDENTIFIERS['Run']}")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring, those of attributes included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def interrogatives(source: str, shown: str) -> Iterator[Hit]:
    """Find the docstrings of one Python file that begin with What, How, Who or Which."""
    for line, text in docstrings(source):
        first = re.match(r"\s*(\w+)", text)
        if first is not None and first[1] in INTERROGATIVES:
            yield Hit(shown, line, f"docstring begins with {first[1]!r}; begin with a verb or a noun phrase")


def files(*patterns: str, root: Path = ROOT) -> list[Path]:
    return sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()})


def all_retired_words(root: Path = ROOT) -> list[Hit]:
    return [
        hit
        for path in files(*PYTHON, *TEXT, root=root)
        for hit in retired_words(path, path.read_text(encoding="utf-8"), str(path.relative_to(root)))
    ]


def all_interrogatives(root: Path = ROOT) -> list[Hit]:
    return [
        hit for path in files(*PYTHON, root=root) for hit in interrogatives(path.read_text(encoding="utf-8"), str(path.relative_to(root)))
    ]


def test_no_retired_word_is_in_use() -> None:
    if hits := all_retired_words():
        pytest.fail("\n".join(map(str, hits)), pytrace=False)


def test_no_docstring_begins_with_a_question_word() -> None:
    if hits := all_interrogatives():
        pytest.fail("\n".join(map(str, hits)), pytrace=False)


@pytest.mark.parametrize(
    ("name", "line", "found"),
    [
        ("src/a.py", "door_count = 1", "'door' is retired"),
        ("src/a.py", "class FrontDoor: ...", "'door' is retired"),
        ("src/a.py", "class PublishRun: ...", "'PublishRun' ends with Run"),
        ("src/a.py", "run_id = 1", "'run id' is retired"),
        ("src/a.py", "shares = 2", "'shares' is retired"),
        ("src/a.py", 'raise ValueError(f"{1} has no lane")', "'lane' is retired"),
        ("src/a.py", 'text = "one\\ntwo\\nhouse"', "'house' is retired"),
        ("src/a.py", "x = 1  # read anew", "'anew' is retired"),
        ("src/a.py", '"""Resume behind\n   the last row."""', "'behind the last' is retired"),
        ("docs/a.md", "The bulk lane is fast.", "'bulk lane' is retired"),
        ("Makefile", "help: ## list the verbs", "'verbs' is retired"),
    ],
)
def test_a_planted_word_is_found(tmp_path: Path, name: str, line: str, found: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"\n{line}\n")
    hits = all_retired_words(tmp_path)
    assert any(found in hit.problem for hit in hits)
    assert {(hit.path, hit.line) for hit in hits} == {(name, 2)}


@pytest.mark.parametrize(
    "line",
    [
        "# Both readers share one file.",
        "runner.run(main)",
        "class Runner: ...",
        'frame.option("txnAppId", name)',
        "run = query.runId  # of Spark",
        "investigated = warehouse = ()",
    ],
)
def test_a_legitimate_use_is_not_found(tmp_path: Path, line: str) -> None:
    path = tmp_path / "src" / "a.py"
    path.parent.mkdir()
    path.write_text(f"{line}\n")
    assert all_retired_words(tmp_path) == []


@pytest.mark.parametrize(
    ("source", "line"),
    [('"""What it does."""', 1), ('def f():\n    """How it works."""', 2), ('x = 1\n"""Which one it is."""', 2)],
)
def test_a_planted_question_word_is_found(tmp_path: Path, source: str, line: int) -> None:
    path = tmp_path / "src" / "a.py"
    path.parent.mkdir()
    path.write_text(source)
    assert [(hit.path, hit.line) for hit in all_interrogatives(tmp_path)] == [("src/a.py", line)]


if __name__ == "__main__":
    print(*all_retired_words(), *all_interrogatives(), sep="\n")
