"""Claim: all commands in READMEs exist with their options, the cheap ones run, and what pages point to is there."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from privmix_cluster.cli import app

ROOT = Path(__file__).parents[2]
FOLDERS = ("cluster", "k8s", "services", "tests")
READMES = [ROOT / "README.md", *sorted(file for name in FOLDERS for file in (ROOT / name).rglob("*.md"))]
PAGES = [*READMES, *sorted((ROOT / ".github").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
INLINE = re.compile(r"`((?:kubectl [^`]*-- )?privmix\s[^`]+)`")
CHEAP = {"plan", "protocols"}


@dataclass(frozen=True)
class Shown:
    """A command in a README. `whole`: it is in a block, to be copied unchanged."""

    readme: str
    argv: tuple[str, ...]
    whole: bool

    def __str__(self) -> str:
        return f"{self.readme}: {shlex.join(self.argv)}"


def blocks(text: str) -> list[str]:
    """Returns the fenced blocks of shell commands."""
    return [block for language, block in FENCE.findall(text) if language in ("", "sh", "bash")]


def shown() -> Iterator[Shown]:
    for readme in READMES:
        text, name = readme.read_text(), str(readme.relative_to(ROOT))
        yield from (Shown(name, argv, True) for block in blocks(text) for argv in commands(block))
        for inline in INLINE.findall(FENCE.sub("", text)):
            yield from (Shown(name, argv, False) for argv in commands(" ".join(inline.split())))


def commands(block: str) -> Iterator[tuple[str, ...]]:
    """Yields the commands of a block, without comments."""
    code = re.sub(r"(^|\s)#.*$", "", block.replace("\\\n", " "), flags=re.M)
    lexer = shlex.shlex(code, posix=True, punctuation_chars=";&|()\n")
    lexer.commenters, lexer.whitespace, lexer.whitespace_split = "", " \t", True
    argv: list[str] = []
    for token in [*lexer, ";"]:
        if set(token) <= set(";&|()\n"):
            if argv:
                yield tuple(argv)
            argv = []
        else:
            argv.append(token)


def inner(command: Shown) -> Shown:
    """Returns the inner command of one like `kubectl exec POD -- privmix status`."""
    argv = command.argv
    return replace(command, argv=argv[argv.index("--") + 1 :]) if "--" in argv else command


EVERY = [command for command in map(inner, shown()) if Path(command.argv[0]).name == "privmix"]
IN_BLOCKS = [command for command in EVERY if command.whole]


def resolved(argv: Sequence[str]) -> tuple[Any, list[str]]:
    """Returns the command and its remaining arguments."""
    command: Any = typer.main.get_command(app)
    left = list(argv[1:])
    while hasattr(command, "get_command") and not (command.invoke_without_command and (not left or left[0][0] == "-")):
        name = left.pop(0) if left else ""
        # A group with a default command returns the word that names none of its commands.
        _, command, rest = command.resolve_command(typer.Context(command), [name])
        left = [*rest, *left]
    return command, left


@pytest.mark.parametrize("command", EVERY, ids=str)
def test_its_options_exist(command: Shown) -> None:
    target_command, left = resolved(command.argv)
    known = {option for parameter in target_command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {argument.split("=")[0] for argument in left if argument.startswith("--")}
    assert given <= known


@pytest.mark.parametrize("command", IN_BLOCKS, ids=str)
def test_its_arguments_are_read(command: Shown, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every file in place, Click accepts the arguments and their types."""
    target_command, left = resolved(command.argv)
    monkeypatch.chdir(tmp_path)
    for argument in left:
        if re.fullmatch(r"[\w-]+\.\w+", argument):
            Path(argument).touch()
    target_command.make_context(str(target_command.name), left)


@pytest.mark.parametrize("command", [each for each in IN_BLOCKS if each.argv[1] in CHEAP], ids=str)
def test_it_runs(command: Shown) -> None:
    result = CliRunner().invoke(app, list(command.argv[1:]))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_modules_that_are_shown_exist(readme: Path) -> None:
    for block in blocks(readme.read_text()):
        for argv in commands(block):
            for argument in argv:
                if re.match(r"(cluster|services|tests|k8s)/", argument):
                    assert (ROOT / argument).exists(), argument
            if "-m" in argv[1:2]:
                assert find_spec(argv[2]), argv[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text())):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.is_relative_to(ROOT), target
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
