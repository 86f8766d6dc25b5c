"""Keeps phrases out of texts that people read: error messages, help, docstrings, comments and docs."""

import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Phrases that are not idiomatic, and what to write instead.
PHRASES = {
    r"\b(tell|tells|told|telling) (?!apart)": "report, describe, name, notify or send",
    r"\b(nobody|somebody|anybody)\b": "name the rank, process or function; or use the passive",
    r"\bwhoever\b": "name the rank, process or function",
    r"\bthat there (is|are) not\b": "unknown, or does not exist",
    r"\bwhich (it|they|\w+) has not\b": "which is not in it",
    r"\bthere is no such\b": "unknown, or does not exist",
    r"\bno \w+ is called\b": "unknown ... 'x'; use 'a' or 'b'",
    r"\bin a way that cannot be\b": "could not be decoded",
    r"\bsomewhen\b": "later",
    r"\banew\b": "again",
    r"\blest\b": "so that ... does not",
    r"\bto be had\b": "available",
    r"\bas ever\b": "as before",
    r"\bat last\b": "finally",
    r"\bfor ever\b": "forever",
    r"\bunder way\b": "in flight",
    r"\bstands? (behind|before|twice|beside|in (line|nobody))\b": "comes after, comes before, appears twice, queues",
    r"\bwaits? in a circle\b": "deadlock",
    r"\b(is|are) there (twice|already|a second time)\b": "appears twice, already exists",
    r"\bso many (columns|stages|ranks|microbatches|steps|uses|digits)\b": "name the parameter",
    r"\bget into each other's way\b|\bin nobody's way\b": "contend, block each other",
}

#: What is covered. Add a folder when its texts have been rewritten.
COVERED = [
    "src/penstock/errors.py",
    "src/penstock/__init__.py",
    "src/penstock/ir",
    "src/penstock/schedules",
    "src/penstock/graph",
    "src/penstock/verification",
    "src/penstock/lowering",
    "src/penstock/simulation",
    "src/penstock/view",
    "src/penstock/execution",
    "src/penstock/models",
    "src/penstock/runtime",
    "src/penstock/pipelining",
    "src/penstock/cli",
    "src/penstock/dropin",
    "examples",
    "benchmarks",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/formats.md",
    "docs/generation.md",
    "docs/simulation.md",
    "docs/planning.md",
    "docs/models.md",
    "docs/running.md",
    "docs/training.md",
    "docs/clusters.md",
    "docs/drop-in.md",
    "docs/verification.md",
    "docs/index.md",
    "docs/tutorial.md",
    "docs/recipes.md",
    "docs/zoo.md",
    "docs/write-a-schedule.md",
    "docs/read-a-timeline.md",
    "docs/debug-a-hang.md",
    "docs/migrate.md",
    "docs/hooks",
]

FILES = [
    path
    for name in COVERED
    for path in ([ROOT / name] if (ROOT / name).is_file() else sorted((ROOT / name).rglob("*")))
    if path.suffix in (".py", ".md", ".js", ".html", ".css")
]


def texts_of(path):
    """Yield the texts of a file by line: of Python only strings and comments, of others everything."""
    content = path.read_text()
    if path.suffix != ".py":
        yield from enumerate(content.splitlines(), start=1)
        return
    for token in tokenize.generate_tokens(io.StringIO(content).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            yield from enumerate(token.string.splitlines(), start=token.start[0])


def phrases_in(path):
    return [
        f"{path.name}:{number}: {text.strip()!r}; write instead: {advice}"
        for number, text in texts_of(path)
        for phrase, advice in PHRASES.items()
        if re.search(phrase, text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_texts_are_plain_english(path):
    assert phrases_in(path) == []


@pytest.mark.parametrize(
    "text",
    [
        "it tells the others",
        "'x' is of a stage that there is not",
        "nobody sends it",
        "no backward is called 'x'; there are full, input and weight",
        "rank 0 waits for ever",
        "--ranks stands behind the script",
        "fit into so many columns",
    ],
)
def test_a_phrase_is_found_in_strings_docstrings_and_comments(tmp_path, text):
    contents = {"a.py": f'x = "{text}"', "b.py": f'"""{text}"""', "c.py": f"x = 1  # {text}", "d.md": text}
    for name, content in contents.items():
        (tmp_path / name).write_text(f"{content}\n")
    assert all(phrases_in(tmp_path / name) for name in contents)


def test_names_are_not_texts(tmp_path):
    (tmp_path / "a.py").write_text("told = anew(lest)\n")
    assert phrases_in(tmp_path / "a.py") == []


def test_names_use_the_words_of_the_field():
    """Names of functions and variables, of the tests as well: what is told is reported, described or named."""
    pattern = r"(^|_)told(_|$)|(^tells?_)|(_tells?(_|$))|that_there_(is|are)_not"  # files have a method tell
    folders = [ROOT / "src", ROOT / "tests", ROOT / "examples", ROOT / "benchmarks"]
    found = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}"
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        if token.type == tokenize.NAME and re.search(pattern, token.string)
    ]
    assert not found
