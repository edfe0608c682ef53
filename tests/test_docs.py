"""The documentation says what the code does, as far as a program can tell."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PARAGRAPHS = [line for line in ARCHITECTURE.splitlines() if "()`" in line]


def test_the_generated_pages_are_what_the_code_says_now() -> None:
    path = ROOT / "tools" / "generate_docs.py"
    spec = importlib.util.spec_from_file_location("generate_docs", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for name, text in tool.pages().items():
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert written == text, f"docs/{name} is out of date: run tools/generate_docs.py"


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(([\w.]+\.md)\)", index))
    assert named == {path.name for path in ROOT.glob("docs/*.md")} - {"index.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_to_a_file_or_heading_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, heading = target.partition("#")
        linked = page if not file else page.parent / file
        assert linked.exists(), target
        if heading:
            assert heading in headings(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(r"`((?:winnow|tests|tools|examples|docs)/[\w/.]+)`", page.read_text("utf-8"))
    missing = [name for name in named if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("paragraph", PARAGRAPHS, ids=lambda text: text[:40])
def test_what_the_architecture_names_is_defined_in_a_module_named_beside_it(paragraph: str) -> None:
    modules = re.findall(r"`(winnow/[\w/]+\.py)`", paragraph)
    found = {name for module in modules for name in definitions(ROOT / module)}
    for function in re.findall(r"`([\w.]+)\(\)`", paragraph):
        assert function in found, f"{function}() is not in {modules}"


def test_every_class_that_the_architecture_names_exists() -> None:
    every = {name for path in ROOT.glob("winnow/**/*.py") for name in definitions(path)}
    named = set(re.findall(r"`([A-Z][a-z]\w+)`", ARCHITECTURE))
    assert named
    assert named <= every


def test_the_architecture_is_long_enough_to_reach_past_the_selection_window() -> None:
    """`make demo` continues that page: a prompt of few blocks would be attended to whole."""
    assert len(ARCHITECTURE) >= 6000


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def definitions(path: Path) -> Iterator[str]:
    """Names of classes, functions and methods of a module; methods also as Class.method."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (
                f"{node.name}.{part.name}"
                for part in node.body
                if isinstance(part, ast.FunctionDef)
            )
