"""Implements `privmix reproduce`: the tables and figures of the papers, each printed number beside ours."""

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from privmix_cluster.options import JsonOption
from privmix_cluster.parameters import bad
from privmix_cluster.tables import show_table

if TYPE_CHECKING:
    from privmix.laboratory.reproduce.catalogue import Item, Paper

_SMALL = "--block 128 --batch 2 --epochs 1"
"""The options of a training on the demo corpus, as the quickstart's."""


def reproduce(
    name: Annotated[str | None, typer.Argument(help="PAPER/ITEM, such as submix/appendix-c3.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List all tables and figures, and what each needs.")] = False,
    corpus: Annotated[Path | None, typer.Option(help="The paper's corpus, to train on.")] = None,
    held_out: Annotated[Path | None, typer.Option(help="The paper's held-out text.")] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small version: the demo corpus and model, at most eight parts.")
    ] = False,
    output: Annotated[Path, typer.Option(help="The directory for what is trained and measured.")] = Path(
        "run/reproduce"
    ),
    as_json: JsonOption = False,
) -> None:
    """Repeat a table or figure of the papers, and show what they print beside what we get.

    What needs a corpus runs with --corpus and --held-out, or with --quick. Else its commands are printed. The exit
    status is 1 if a computed number is not the printed one to its digits, and nothing says why.
    """
    from privmix.laboratory.reproduce.catalogue import load

    names = {f"{own}/{item}": (paper, paper.items[item]) for own, paper in load().items() for item in paper.items}
    if name is None or listed:
        show_table("Tables and figures", [{"name": each, **_listed(*found)} for each, found in names.items()])
        return
    if name not in names:
        raise bad("name", f"there is no {name!r}; `privmix reproduce --list` names them all")
    if (corpus is None) != (held_out is None):
        raise bad("corpus", "needs --held-out too, and --held-out needs --corpus")
    (paper, item), directory = names[name], output / name / ("quick" if quick else "full")
    if quick and item.parts:
        corpus, held_out = _demo(directory)
    numbers = [number.row() for number in item.numbers]
    texts = (corpus or Path("CORPUS"), held_out or Path("HELD_OUT"))
    steps = list(paper.steps(item, *texts, directory, _SMALL if quick else None))
    measured = []
    if not item.parts or corpus is not None:
        for step in steps:
            _run(step)
        measured = list(_measured(item, directory / "evaluation", exact=not quick)) if item.parts else []
    commands = [shlex.join(["privmix", *step]) for step in steps]
    if as_json:
        print(json.dumps({"name": name, "numbers": numbers, "measured": measured, "commands": commands}))
    else:
        for title, rows in ((item.about, numbers), ("measured, a small version" if quick else "measured", measured)):
            if rows:
                show_table(title, rows)
        print("\n".join([*commands, f"corpus: {paper.corpus}"] if item.parts else commands), item.needs or "")
    if any(row["agrees"] is False and row["why"] is None for row in numbers):
        raise typer.Exit(1)


def _listed(paper: "Paper", item: "Item") -> dict[str, str]:
    """Returns what a table or figure is, and what it needs."""
    alone = bool(item.numbers or item.commands)
    minutes = item.commands or any(number.slow for number in item.numbers)
    needs = [f"nothing, {'minutes' if minutes else 'seconds'}"] * alone + ["a corpus, or --quick"] * bool(item.parts)
    return {"about": item.about, "needs": "; then ".join(needs) or str(item.needs)}


def _demo(directory: Path) -> tuple[Path, Path]:
    """Writes the demo corpus; returns its two files."""
    from privmix.training import demo

    demo.write_demo_corpus(directory / "corpus", users=120, held_out=20)
    return directory / "corpus" / demo.TRAIN, directory / "corpus" / demo.HELD_OUT


def _run(step: list[str]) -> None:
    """Runs a command of `privmix`. Its own output goes to stderr."""
    from privmix_cluster import cli

    typer.echo(shlex.join(["privmix", *step]), err=True)
    with redirect_stdout(sys.stderr):
        status = cli.load(step[0]).main(step[1:], prog_name=f"privmix {step[0]}", standalone_mode=False)
    if status:
        raise typer.Exit(status)


def _measured(item: "Item", evaluation: Path, *, exact: bool) -> Iterator[dict[str, Any]]:
    """Yields what was measured of each method, beside what is printed of it."""
    from privmix.laboratory.evaluation.report import JSON_FILE
    from privmix.laboratory.reproduce.catalogue import agrees

    found = json.loads((evaluation / JSON_FILE).read_text())
    for table in found["tables"]:
        known: dict[str, float] = {}
        for result in table["results"]:
            runs = [each for each in (result["perplexity"] or {}).get("runs", ()) if isinstance(each, float)]
            # The papers take the arithmetic mean over runs.
            both = {"perplexity": fmean(runs) if runs else None, "measured": result["reached"]["measured"]}
            known |= {result["label"]: fmean(runs)} if runs and result["label"] not in known else {}
            both["share"] = _share(both["perplexity"], known)
            own = result["losses"] or {}
            losses = {"loss": own["quarters"][-1], "screened": own["screened"]} if own else {}
            ours, printed = both[item.column], item.printed.get(result["label"])
            swept = {} if table["value"] is None else {found["sweep"]: table["value"]}
            yield {
                "method": result["label"],
                "parts": result["parts"],
                **swept,
                **both,
                **losses,
                "printed": printed,
            } | ({"agrees": agrees(printed, ours)} if exact and printed and isinstance(ours, float) else {})


def _share(perplexity: float | None, known: Mapping[str, float]) -> float | None:
    """Returns the share of what fine-tuning gains over the public model; None without both of them."""
    public, tuned = known.get("Public model"), known.get("Fine-tuned, not private")
    if perplexity is None or public is None or tuned is None or not tuned < public:
        return None
    return (public - perplexity) / (public - tuned)
