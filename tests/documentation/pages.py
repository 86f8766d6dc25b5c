"""Runs the code of a page of documentation: all blocks in order, in one namespace, in a folder of its own.

What a block is says its fence, or the first word of a comment that readers do not see, for what a block needs:

    ```python               with prompts a doctest, else statements
    ```python title="a.py"  a file, also of any other language
    ```console              commands after "$ ", and what they print; without output they must succeed
    ```text, ```diff        not run

With ``<!-- ranks: 2 -->``, the statements are one script of two processes that have a process group.
"""

from __future__ import annotations

import doctest
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch.distributed as dist

FENCE = re.compile(r"^(?P<indent> *)```(?P<kind>\w*)(?: title=\"(?P<title>[^\"]+)\")?$")
COMMENT = re.compile(r"^<!-- (?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?$")
RANKS = re.compile(r"^<!-- ranks: (\d+) -->$", re.MULTILINE)
ROOT = Path(__file__).parents[2]
NOT_RUN = {"text", "diff"}

#: Statements may have a process group, of this process.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

#: How long a command may take, in seconds.
LIMIT = 240


class Block(NamedTuple):
    """A block of a page, and the line where its text begins, counted from 1."""

    kind: str
    title: str | None
    text: str
    line: int

    @property
    def is_statements(self):
        return self.kind == "python" and self.title is None and not self.is_doctest

    @property
    def is_doctest(self):
        return self.kind == "python" and self.title is None and self.text.lstrip().startswith(">>> ")


def blocks_of(page):
    """Return the blocks of a page; one that would not be run is an error."""
    blocks, lines = [], page.read_text().splitlines()
    number = 0
    while number < len(lines):
        opening = FENCE.match(lines[number]) or COMMENT.match(lines[number])
        if opening is None:
            if lines[number].lstrip().startswith("```"):
                raise ValueError(f"{page.name}:{number + 1}: {lines[number]!r} is not the beginning of a block")
            number += 1
            continue
        found = {"indent": "", "title": None, **opening.groupdict()}
        end = found["indent"] + "```" if opening.re is FENCE else "-->"
        last = lines.index(end, number + 1)
        text = textwrap.dedent("\n".join(lines[number + 1 : last]) + "\n")
        if found["kind"] not in {"python", "console"} | NOT_RUN and not found["title"]:
            raise ValueError(f"{page.name}:{number + 1}: ```{found['kind']} is not run: name a title, or ```text")
        blocks.append(Block(found["kind"], found["title"], text, number + 2))
        number = last + 1
    return blocks


class Page(pytest.File):
    """A page, which is one test."""

    def collect(self):
        yield PageTest.from_parent(self, name=self.path.name)


class PageTest(pytest.Item):
    """Runs the blocks of a page."""

    def __init__(self, **options):
        super().__init__(**options)
        self.blocks = blocks_of(self.path)
        self.ranks = int(found[1]) if (found := RANKS.search(self.path.read_text())) else None
        if self.ranks or any(block.kind == "console" for block in self.blocks):
            self.add_marker("processes")

    def runtest(self):
        with tempfile.TemporaryDirectory() as folder, chdir(folder), patch.dict(os.environ, ALONE):
            try:
                self.run_blocks({"__name__": "__main__", "__file__": str(self.path)})
            finally:
                if dist.is_initialized():
                    dist.destroy_process_group()

    def run_blocks(self, namespace):
        Path("examples").symlink_to(ROOT / "examples")
        if self.ranks:
            self.run_in_ranks()
        for block in self.blocks:
            if block.title is not None:
                Path(block.title).parent.mkdir(parents=True, exist_ok=True)
                Path(block.title).write_text(block.text)
            elif block.is_doctest:
                self.run_doctest(block, namespace)
            elif block.is_statements and not self.ranks:
                exec(compile(self.script([block]), str(self.path), "exec", dont_inherit=True), namespace)
            elif block.kind == "console":
                self.run_commands(block)

    def script(self, blocks):
        """Join blocks, each in the lines that it has in the page, so that tracebacks name these."""
        lines = []
        for block in blocks:
            lines += [""] * (block.line - 1 - len(lines)) + block.text.splitlines()
        return "\n".join(lines) + "\n"

    def run_in_ranks(self):
        """Run the statements of the page as a script in several processes."""
        Path("page.py").write_text(self.script(block for block in self.blocks if block.is_statements))
        result = run_command(f"penstock run --ranks {self.ranks} page.py")
        assert result.returncode == 0, f"{self.path.name}, whose lines are those of page.py:\n{result.stdout}"

    def run_doctest(self, block, namespace):
        examples = doctest.DocTestParser().get_examples(block.text, self.path.name)
        test = doctest.DocTest(examples, {}, self.path.name, str(self.path), block.line - 1, block.text)
        test.globs = namespace  # a copy would hide what later blocks define from functions of this one
        reports = []
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=reports.append, clear_globs=False)
        assert not reports, "".join(reports)

    def run_commands(self, block):
        for shown in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
            command, expected = re.fullmatch(r"((?:.*\\\n)*.*\n?)((?:.*\n?)*)", shown).groups()
            result = run_command(command)
            where = f"{self.path.name}:{block.line}: $ {command}"
            if expected.strip():
                expected = re.sub(r"\n\.\.\.$", "...", re.sub(r"^\.\.\.\n", "...", expected.strip()))
                flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                same = doctest.OutputChecker().check_output(expected, result.stdout, flags)
                assert same, f"{where}shows\n{expected}\nbut printed\n{result.stdout}"
            else:
                assert result.returncode == 0, f"{where}\n{result.stdout}"

    def repr_failure(self, failure, style=None):
        if isinstance(failure.value, AssertionError) and failure.value.args:
            return str(failure.value)
        failure.traceback = failure.traceback.cut(path=self.path)
        return failure.getrepr(style="short")

    def reportinfo(self):
        return self.path, 0, self.path.name


def run_command(command):
    """Run a command of a page: the programs are those that are tested, and the terminal is 100 columns wide."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return subprocess.run(
        ["bash", "-c", command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        timeout=LIMIT,
    )


def pytest_collect_file(file_path, parent):
    """Collect a page of documentation."""
    return Page.from_parent(parent, path=file_path) if file_path.suffix == ".md" else None
