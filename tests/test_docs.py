"""The pages of docs/: the code in them runs and prints what they say, and what they name exists.

A block of Python in a page is compiled, and all it takes from multiassert must be there. `<!-- run: raise -->` before
it has it executed too, in that mode; `<!-- run: simulated npu -->` has it executed in a child process. What the next
block after `<!-- prints -->` holds is what it must print, log, and raise.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import io
import logging
import pathlib
import re
import subprocess
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

import multiassert
import pytest_multiassert
from conftest import ChildRun
from multiassert import backends, settings
from multiassert.__main__ import main
from multiassert.audit.rules import RULES
from multiassert.pytest_plugin import KINDS

yaml = pytest.importorskip("yaml", reason="the site's configuration is YAML: pip install pyyaml")

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CONFIGURATION = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
# Written by commands, of which other tests see to it that they are right.
GENERATED = ("alive.md", "benchmarks.md")
WRITTEN = [page for page in PAGES if page.name not in GENERATED]

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.DOTALL | re.MULTILINE
)
REMARK = re.compile(r"<!-- (\w+)(?:: ([^>]+?))? -->\s*\Z")
INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
DOTTED = re.compile(r"(?<![\w./-])multiassert(?:\.[A-Za-z_]\w*)+")


def name_of(page: pathlib.Path) -> str:
    return page.relative_to(DOCS).as_posix()


pages = pytest.mark.parametrize("page", WRITTEN, ids=name_of)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks.


@dataclasses.dataclass(frozen=True)
class Block:
    """Code in a page."""

    page: str
    line: int
    language: str
    code: str
    run: str | None  # how it is to be run, if it is
    prints: str | None  # what it must print

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: pathlib.Path) -> list[Block]:
    text = page.read_text()
    blocks: list[Block] = []
    for found in FENCE.finditer(text):
        indent, language, code = found.group("indent", "language", "code")
        code = "".join(line.removeprefix(indent) for line in code.splitlines(keepends=True))
        remark = REMARK.search(text[: found.start()])
        what, how = remark.groups() if remark is not None else (None, None)
        if what == "prints":
            assert blocks, f"{page}: nothing that could print this"
            assert blocks[-1].run, f"{blocks[-1]}: it says what this prints, and not that it is run"
            blocks[-1] = dataclasses.replace(blocks[-1], prints=code)
        elif what == "run":
            assert how, f"{page}: <!-- run --> without a mode"
        line = text.count("\n", 0, found.start("code")) + 1
        blocks.append(Block(name_of(page), line, language, code, how if what == "run" else None, None))
    return blocks


BLOCKS = [block for page in WRITTEN for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
IN_THIS_PROCESS = [block for block in PYTHON if block.run in settings.SPELLINGS]
SIMULATED = [block for block in PYTHON if block.run is not None and block not in IN_THIS_PROCESS]


def outcome(block: Block) -> str:
    """What a block prints and logs, and the error that ends it, as a terminal would show them."""
    seen = io.StringIO()
    handler = logging.StreamHandler(seen)
    logger = logging.getLogger("multiassert")
    level = logger.level
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(seen):
            exec(compile(block.code, "serve.py", "exec"), {"__name__": "__main__"})
    except multiassert.AsyncAssertionError as error:
        seen.write(f"multiassert.AsyncAssertionError: {error}\n")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return seen.getvalue()


def test_there_are_blocks_of_each_sort() -> None:
    """Else the tests below would have nothing to do."""
    assert len(PAGES) > 25
    assert len(PYTHON) >= 20
    assert len(IN_THIS_PROCESS) >= 6
    assert len(SIMULATED) >= 2
    assert sum(block.prints is not None for block in PYTHON) >= 8


@pytest.mark.parametrize("block", IN_THIS_PROCESS, ids=str)
def test_a_block_prints_what_the_page_says(block: Block) -> None:
    if "transformers" in block.code:
        pytest.importorskip("transformers", reason="transformers is not installed")
    with multiassert.override(block.run):
        printed = outcome(block)
    assert printed == (block.prints or "")


def test_blocks_on_a_simulated_device(run_child: ChildRun) -> None:
    """In one process, since importing torch takes most of the time."""
    children = {block.run for block in SIMULATED}
    assert children == {"simulated npu"}, f"good remarks are the modes and 'simulated npu', found {children}"
    calls = [f"exec(compile({block.code!r}, 'serve.py', 'exec'), {{}}); print({str(block)!r})" for block in SIMULATED]
    ended = run_child("\n".join(calls), MULTIASSERT="raise")
    assert ended.returncode == 0, ended.stderr
    expected = "".join(f"{block.prints or ''}{block}\n" for block in SIMULATED)
    assert ended.stdout == expected


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason=f"seen with torch 2.13, and this is {torch.__version__}"
)
def test_attention_on_the_cpu_swallows_a_nan() -> None:
    """What bisect.md says of it: the row is zeros, and so are the logits that come of it."""
    queries = torch.ones(1, 1, 4, 8)
    queries[0, 0, 2, 3] = float("nan")
    attended = torch.nn.functional.scaled_dot_product_attention(queries, torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8))
    assert attended[0, 0, 2].tolist() == [0.0] * 8
    assert attended[0, 0, 1].tolist() == [1.0] * 8


# ---------------------------------------------------------------------------------------------------------------------
# Names.


@dataclasses.dataclass(frozen=True)
class Text:
    """A piece of a page that is code: a block, or inline."""

    place: str
    text: str
    is_python: bool


def code_of(page: pathlib.Path) -> list[Text]:
    """All blocks and all inline code."""
    prose = FENCE.sub("", page.read_text())
    inline = [Text(f"{name_of(page)}, in `{text}`", text, True) for text in INLINE.findall(prose)]
    return [*(Text(str(block), block.code, block.language == "python") for block in blocks_of(page)), *inline]


def resolved(name: str) -> Any:
    """What a dotted name stands for; raises ImportError where there is no such thing."""
    path, *rest = name.split(".")
    found: Any = importlib.import_module(path)
    for part in rest:
        path = f"{path}.{part}"
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(path)
    return found


@pages
def test_what_a_page_names_of_multiassert_exists(page: pathlib.Path) -> None:
    missing = []
    for code in code_of(page):
        for name in DOTTED.findall(code.text):
            try:
                resolved(name)
            except ImportError as error:
                missing.append(f"{code.place}: {name} ({error})")
    assert not missing


@pages
def test_blocks_of_python_compile_and_import_what_exists(page: pathlib.Path) -> None:
    for block in blocks_of(page):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.code, str(block))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "multiassert":
                for alias in node.names:
                    assert resolved(f"{node.module}.{alias.name}") is not None, f"{block}: {alias.name}"


@pages
def test_calls_take_the_arguments_that_a_page_gives(page: pathlib.Path) -> None:
    """By name, in blocks of Python and in inline code."""
    wrong = []
    for code in code_of(page):
        for function, keywords in calls_in(code):
            takes = inspect.signature(function).parameters
            known = set(takes) | (set(settings.KNOWN_PLATFORMS) if "platforms" in takes else set())
            wrong += [f"{code.place}: {keyword}=" for keyword in keywords if keyword not in known]
    assert not wrong


def calls_in(code: Text) -> Iterator[tuple[Any, list[str]]]:
    """The calls of public functions of multiassert, with the names of their arguments."""
    try:
        tree = ast.parse(code.text)
    except SyntaxError:  # inline code is seldom Python; blocks have a test of their own
        return
    for node in ast.walk(tree):
        if code.is_python and isinstance(node, ast.Call):
            name = ast.unparse(node.func).removeprefix("multiassert.")
            if name in multiassert.__all__ or name.startswith(("injection.", "simulate.")):
                yield resolved(f"multiassert.{name}"), [keyword.arg for keyword in node.keywords if keyword.arg]


WORDS_OF_SOURCE = {
    word
    for source in [ROOT / "pytest_multiassert.py", *(ROOT / "multiassert").rglob("*.py")]
    for word in re.findall(r"\w+", source.read_text())
}
KNOWN_VARIABLES = {
    "MULTIASSERT",
    *(f"MULTIASSERT_{platform.upper()}" for platform in (*settings.KNOWN_PLATFORMS, "hpu")),
    *settings.OTHER_VARIABLES,
}


@pages
def test_variables_exist(page: pathlib.Path) -> None:
    text = page.read_text()
    ours = set(re.findall(r"\bMULTIASSERT(?:_[A-Z]+)*\b", text))
    assert ours <= KNOWN_VARIABLES
    assert set(re.findall(r"\bSGLANG(?:_[A-Z]+)+\b", text)) <= WORDS_OF_SOURCE


def options_of(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return set(re.findall(r"--[a-z][a-z-]*", capsys.readouterr().out))


COMMAND = re.compile(r"^ *(?:- run: )?(?:[A-Z_]+=\S+ )*(?:python -m )?multiassert ([a-z]+)([^#&|;`)]*)", re.MULTILINE)


@pages
def test_commands_and_their_options_exist(page: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    inline = [Text(f"{name_of(page)}: {text}", text, False) for text in INLINE.findall(FENCE.sub("", page.read_text()))]
    shell = [
        Text(str(block), block.code, False) for block in blocks_of(page) if block.language not in ("python", "text")
    ]
    for code in (*inline, *shell):
        for command, rest in COMMAND.findall(code.text):
            assert command in ("audit", "ci", "demo", "doctor"), code.place
            used = {word.partition("=")[0] for word in rest.split() if word.startswith("--")}
            assert used <= options_of(command, capsys), code.place


class Recorded(argparse.ArgumentParser):
    """Stands for pytest's parser, and remembers the names of options."""

    def getgroup(self, *_: object) -> Recorded:
        return self

    def addoption(self, name: str, **_: object) -> None:
        self.add_argument(name)

    def addini(self, name: str, *_: object, **__: object) -> None:
        self.add_argument(name)


@pages
def test_options_of_pytest_exist(page: pathlib.Path) -> None:
    parser = Recorded()
    pytest_multiassert.pytest_addoption(parser)  # type: ignore[arg-type]
    known = {action.option_strings[0] for action in parser._actions if action.option_strings}
    assert "--multiassert" in known
    used = set(re.findall(r"--multiassert(?:-[a-z]+)*", page.read_text()))
    assert used <= known


@pages
def test_words_that_begin_with_our_name_exist(page: pathlib.Path) -> None:
    """Fixtures, metrics, the module of the plugin."""
    for word in set(re.findall(r"\bmultiassert_[a-z_]+\b", page.read_text())) - {"multiassert_backend"}:
        # The library appends _total to the name of a counter.
        assert word == "pytest_multiassert" or word.removesuffix("_total") in WORDS_OF_SOURCE, word


FILES_NAMED = re.compile(r"`((?:tests|scripts|examples|backends|benchmarks)/[\w/.]*)`")


@pages
def test_files_that_a_page_names_are_there(page: pathlib.Path) -> None:
    named = set(FILES_NAMED.findall(page.read_text()))
    assert not {name for name in named if not (ROOT / name).exists()}


# ---------------------------------------------------------------------------------------------------------------------
# Lists.


def first_cells(page: str, heading: str = "") -> list[str]:
    """What stands in the first column of the tables below a heading."""
    text = (DOCS / page).read_text().partition(f"## {heading}\n" if heading else "\n")[2].partition("\n## ")[0]
    return [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]


def names_in(cells: Iterable[str]) -> list[str]:
    return [name for cell in cells for name in INLINE.findall(cell)]


def test_the_doctors_questions_are_its_own() -> None:
    sources = (ROOT / "multiassert" / "doctor" / "diagnosis.py").read_text()
    questions = first_cells("verify.md", "1. On this machine: `multiassert doctor`")
    assert len(questions) > 15
    for question in questions:
        assert f'"{question}"' in sources or question in ("question", "where it says NO"), question


def test_the_rules_of_the_audit_are_all_there() -> None:
    rules = [rule.name for rule in RULES]
    assert names_in(first_cells("audit.md"))[: len(rules)] == rules
    assert sorted(names_in(first_cells("audit.md", "SGLang and vLLM, as examples"))) == sorted(rules)


def test_the_modes_are_all_there() -> None:
    assert names_in(first_cells("settings.md", "Modes")) == [mode.value for mode in settings.Mode]
    variables = names_in(first_cells("settings.md", "Variables"))
    assert set(variables) - {"MULTIASSERT_"} == KNOWN_VARIABLES - {"MULTIASSERT_HPU"}


def test_the_fields_of_a_record_are_its_own() -> None:
    fields = {field.name for field in dataclasses.fields(multiassert.Violation)}
    told = names_in(first_cells("bisect.md", "1. Read the first record"))
    assert len(told) > 8
    assert set(told) <= fields


def test_the_kinds_are_all_there() -> None:
    (told,) = re.findall(r"^`kind` is (.*?);", (DOCS / "testing.md").read_text(), re.MULTILINE)
    assert tuple(INLINE.findall(told)) == KINDS


# ---------------------------------------------------------------------------------------------------------------------
# What is said of platforms.


PLATFORM_PAGES = {name: (DOCS / "platforms" / f"{name}.md").read_text() for name in settings.KNOWN_PLATFORMS}


@pytest.mark.parametrize("name", settings.KNOWN_PLATFORMS)
def test_a_page_of_a_platform_says_what_auto_chooses(name: str) -> None:
    page = PLATFORM_PAGES[name]
    (chosen,) = re.findall(r"^\| `auto` \| (\w+)", page, re.MULTILINE)
    # Of ROCm, it depends on how torch was built.
    assert chosen == ("native" if name == "rocm" else backends.named(name).auto().value)
    assert f"MULTIASSERT_{name.upper()}=" in page
    assert f"multiassert doctor --platform {name}" in page


@pytest.mark.parametrize("name", [name for name in settings.KNOWN_PLATFORMS if name != "rocm"])
def test_a_page_of_a_platform_says_whether_trap_is_refused(name: str) -> None:
    is_refused = backends.named(name).trap_refusal() is not None
    assert ("`trap` is refused" in PLATFORM_PAGES[name]) is is_refused


@pytest.mark.parametrize("name", settings.KNOWN_PLATFORMS)
def test_a_page_of_a_platform_marks_its_claims(name: str) -> None:
    """Each row of the first table says how it is known, but for what auto is, which is ours to say."""
    table = [line for line in PLATFORM_PAGES[name].splitlines() if line.startswith("|")]
    rows = [line for line in table[2 : table.index("", 2) if "" in table else 7] if not line.startswith("| `auto`")]
    for row in rows:
        if not row.startswith(("| products", "|---", "| Atlas")):
            assert re.search(r"\*(run|simulated|read|unknown)\*", row), row


# ---------------------------------------------------------------------------------------------------------------------
# The site.


def pages_of_nav(entries: Iterable[Any]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
            continue
        for below in entry.values():
            yield from pages_of_nav([below] if isinstance(below, str) else below)


def test_each_page_is_in_the_navigation_once() -> None:
    assert sorted(pages_of_nav(CONFIGURATION["nav"])) == sorted(map(name_of, PAGES))


def test_a_broken_link_ends_the_build() -> None:
    assert CONFIGURATION["strict"] is True
    assert set(CONFIGURATION["validation"]["nav"].values()) == {"warn"}
    assert set(CONFIGURATION["validation"]["links"].values()) == {"warn"}
    assert CONFIGURATION["theme"]["font"] is False  # else the pages ask another host for one


def anchor_of(heading: str) -> str:
    """As Python-Markdown makes it."""
    plain = re.sub(r"[`*_]|\]\([^)]*\)|\[", "", heading)
    plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors_of(page: pathlib.Path) -> set[str]:
    return {anchor_of(heading) for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link}: there is no {target}"
        assert not anchor or anchor in anchors_of(target), f"{link}: {path or page.name} has no such heading"


def test_the_reference_holds_every_public_name() -> None:
    page = (DOCS / "reference.md").read_text()
    named = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    for name in named:
        assert inspect.getdoc(resolved(name)), f"{name} has no docstring"
    assert {f"multiassert.{name}" for name in multiassert.__all__} <= set(named)


def test_the_site_is_built(tmp_path: pathlib.Path) -> None:
    needed = [
        name for name in ("mkdocs", "material", "mkdocstrings_handlers") if importlib.util.find_spec(name) is None
    ]
    if needed:
        pytest.skip(f"{', '.join(needed)} not installed: pip install 'multiassert[docs]'")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert built.returncode == 0, built.stderr
    html = "".join(page.read_text() for page in tmp_path.rglob("*.html"))
    assert "fonts.googleapis" not in html
    assert not re.search(r"<(?:script|img)[^>]* src=.?https?:", html), "a page loads something from another host"
    assert "running extremes on the device, no host wait" in html  # of a docstring
