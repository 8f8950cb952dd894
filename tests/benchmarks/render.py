"""Writes measured figures into the pages: `python -m tests.benchmarks.render`; with --check, names pages that differ.

A page names what it shows, and the text between the marks is written by the function of this name in `figures`:

    A token costs <!--=plain_tokens_pmixed-->1.3<!--/--> plain ones.

Text of several lines, such as a table, has its marks on lines of their own.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from privmix.foundation.files import write_atomically
from tests.benchmarks.figures import FIGURES
from tests.benchmarks.record import ROOT

FOLDERS = (".github", "cluster", "k8s", "services", "tests")
REGION = re.compile(r"<!--=(\w*)-->(.*?)<!--/-->", re.S)
MARK = re.compile(r"<!--(=.*?|/)-->", re.S)
AT_START = re.compile(r"^[ \t>*-]*<!--=\w+-->.*\S", re.M)
"""Markdown takes a line that begins with a comment for HTML, and formats none of it."""


def rendered(page: str, figures: Mapping[str, Callable[[], str]] = FIGURES) -> str:
    """Returns the text of a page with its figures as they were measured.

    Raises:
        ValueError: a mark names no figure, has no end or beginning, or begins a line with text after it; or a record
            lacks a figure.
    """
    if len(MARK.findall(page)) != 2 * len(REGION.findall(page)):
        raise ValueError("a mark <!--=NAME--> needs its <!--/--> before the next one")
    if unknown := {name for name, _ in REGION.findall(page)} - set(figures):
        raise ValueError(f"{', '.join(sorted(unknown))}: no function of this name is in tests/benchmarks/figures.py")
    if found := AT_START.search(page):
        raise ValueError(f"{found[0].strip()[:40]}: begin the line with other text, or end it after the mark")
    return REGION.sub(lambda region: f"<!--={region[1]}-->{_measured(region[1], figures)}<!--/-->", page)


def _measured(name: str, figures: Mapping[str, Callable[[], str]]) -> str:
    try:
        return figures[name]()
    except LookupError as error:
        raise ValueError(f"{name}: its record has no {error}") from error


def pages() -> list[Path]:
    """Returns the pages of the project."""
    return [ROOT / "README.md", *sorted(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]


def differing() -> dict[Path, str]:
    """Returns what pages should say, by those that say something else.

    Raises:
        ValueError: a page's marks are wrong.
    """
    found = {}
    for page in pages():
        text = page.read_text()
        try:
            right = rendered(text)
        except ValueError as error:
            raise ValueError(f"{page.relative_to(ROOT)}: {error}") from error
        if right != text:
            found[page] = right
    return found


def main(check: Annotated[bool, typer.Option("--check", help="Fail if a page differs; change none.")] = False) -> None:
    """Writes measured figures into the pages."""
    try:
        pages = differing()
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for page, text in pages.items():
        print(f"{page.relative_to(ROOT)}: {'differs from what was measured' if check else 'written'}")
        if not check:
            write_atomically(page, text.encode())
    if check and pages:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
