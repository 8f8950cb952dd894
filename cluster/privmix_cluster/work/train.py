"""Does the work of `privmix train` and `privmix train-base`."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import typer

from privmix.budget.receipt import FILE as RECEIPT
from privmix.privacy.accounting import stated
from privmix.training import dp_sgd
from privmix.training.corpus import Corpus, kinds
from privmix.training.expectation import Population, Requirements, propose
from privmix.training.manifest import FILE as MANIFEST
from privmix.training.manifest import Manifest, StatedSize
from privmix.training.options import (
    AUTO_BASE,
    DP_SGD_TRAINING,
    DpSgdOptions,
    TokenBudget,
    TrainingOptions,
)
from privmix.training.plan import OpenPlan, Trained, run_training
from privmix.training.splitting import base_share
from privmix_cluster.console import display
from privmix_cluster.options import RunOptions
from privmix_cluster.parameters import bad


def given_parts(parts: int, output: Path) -> int:
    """Returns the number, and says so on stderr if a ledger of the ensemble may not accept it."""
    if (output / RECEIPT).exists() and (output / MANIFEST).exists():
        before = len(Manifest.load(output).parts)
        if before != parts:
            typer.echo(
                f"parts: {output} has {before} parts and a ledger. A ledger that charges each part for itself "
                "(protocol individual, measured losses) refuses another number, because it gives users other parts. To "
                "keep such a ledger, leave --parts out.",
                err=True,
            )
    return parts


def earlier_size(output: Path, parts: int | None) -> StatedSize | None:
    """Returns the size from which the ensemble in `output` got its parts, if it keeps their number."""
    if not (output / MANIFEST).exists():
        return None
    manifest = Manifest.load(output)
    return manifest.stated if parts in (None, len(manifest.parts)) else None


def check_base(base: str, model: str | None) -> None:
    """Raises `typer.BadParameter` if parts cannot be trained on this base."""
    if base == AUTO_BASE:
        return
    if model is not None:
        raise bad("base", "is the model that the parts are trained on; leave --model out")
    if Manifest.load(Path(base)).dp_sgd is None:
        raise bad("base", f"{base} was not trained with DP-SGD; train a base with `privmix train-base`")


def auto_epsilon(
    share: float | None,
    size: StatedSize | None,
    output: Path,
    parts: int | None,
    budget: TokenBudget,
) -> float:
    """Returns the epsilon of the base of `--base auto`: a share of the promised one, or what a finished base cost.

    Raises:
        typer.BadParameter: a finished base leaves nothing of epsilon.
        InputError: there is no share that is worth anything (`base_share`).
    """
    epsilon = budget.epsilon
    if share is not None:
        return share * epsilon
    if (output / MANIFEST).exists() and (trained := Manifest.load(output).dp_sgd) is not None:
        if trained.epsilon >= epsilon:
            raise bad("epsilon", f"must be above the {stated(trained.epsilon)} that the base in {output} cost")
        return trained.epsilon
    share = base_share(size, parts, budget)
    typer.echo(
        f"base-share: {share:g} of epsilon {stated(epsilon)} for the base, the rest for {budget.tokens:,} tokens, by "
        "`privmix plan --users`; --base-share sets another share.",
        err=True,
    )
    return share * epsilon


def auto_base(
    corpus: Corpus,
    run: RunOptions,
    recipe: Mapping[str, object],
    epsilon: float,
    delta: float,
) -> Path:
    """Trains the base of `--base auto` by the default recipe, or keeps the finished one; returns its directory."""
    chosen = {name: value for name, value in recipe.items() if name in ("block", "precision")}
    below = replace(run, output=run.output / "base")
    train_base(corpus, below, chosen, DpSgdOptions.checked(epsilon=epsilon, delta=delta))
    return below.output


def train_base(corpus: Corpus, run: RunOptions, given: Mapping[str, object], private: DpSgdOptions) -> Trained:
    """Trains one adapter with DP-SGD, or keeps the finished one.

    Args:
        given: what differs from the default recipe.

    Raises:
        InputError: an argument is invalid.
        WorkError: the training failed, or another one is writing to the directory.
    """
    plan = dp_sgd.plan(
        corpus,
        run.output,
        private=private,
        model=run.model,
        options=TrainingOptions.checked(**DP_SGD_TRAINING.model_dump() | dict(given)),
        salt_file=run.salt_file,
    )
    return run_plan(plan, corpus, run)


def run_plan(plan: OpenPlan, corpus: Corpus, run: RunOptions) -> Trained:
    """Trains what is missing, and shows the progress."""
    shown = display(run.as_json)
    corpus.report = shown.read
    return run_training(plan, run.resources, shown)


def proposed_parts(size: StatedSize | None, output: Path, options: TrainingOptions, budget: TokenBudget) -> int:
    """Returns the number of parts in `output`, or what `privmix plan` proposes for the stated size if there is one.

    The number is public, so it never depends on the corpus.
    """
    if size is None:
        if (output / MANIFEST).exists():
            return len(Manifest.load(output).parts)
        raise bad(
            "parts",
            "is missing; set it, or state about how many users the corpus has (--users, and --tokens-per-user). The "
            "number of parts is public, so it is not taken from the corpus",
        )
    population = Population(size.users, size.tokens)
    proposal = propose(Requirements(population, budget, part_kind=options.part_kind))
    parts = proposal.protocol.parts
    of_each = "" if size.tokens_per_user is None else f" of {size.tokens_per_user:,} tokens"
    typer.echo(
        f"parts: {parts}, proposed for about {size.users:,} users{of_each} at epsilon {stated(budget.epsilon)}, "
        f"delta {budget.delta:g}, {budget.tokens:,} tokens. These numbers are public; --parts sets another number.",
        err=True,
    )
    better = propose(Requirements(population, budget))
    if better.gain and proposal.gain and better.gain.mean > proposal.gain.mean:
        typer.echo(
            f"--part-kind {better.part_kind} is expected to gain more: {better.gain.mean:.2f} nats per token with "
            f"{better.protocol.parts} parts instead of {proposal.gain.mean:.2f}, by `privmix plan --users`.",
            err=True,
        )
    return parts


def report_training(trained: Trained, run: RunOptions, seconds: float) -> None:
    if run.as_json:
        summary = {
            "ensemble": trained.manifest.ensemble,
            "output": str(run.output),
            "parts": len(trained.manifest.parts),
            "adapters": len(trained.manifest.adapters),
            "trained": trained.trained,
            "kept": trained.kept,
            "skipped": sum(trained.skipped.values()),
            "skipped_by_kind": dict(trained.skipped),
            "seconds": round(seconds, 1),
        }
        if trained.manifest.private_base:
            summary["private_base"] = trained.manifest.private_base.model_dump(mode="json")
        if trained.manifest.dp_sgd:
            summary["dp_sgd"] = trained.manifest.dp_sgd.model_dump(mode="json")
        typer.echo(json.dumps(summary))
    else:
        kind, done = ("texts", "written") if trained.manifest.part_kind == "text" else ("adapters", "trained")
        typer.echo(
            f"{run.output}: {len(trained.manifest.parts)} parts, {len(trained.manifest.adapters)} {kind}, "
            f"{trained.trained} of them {done} and {trained.kept} kept, "
            f"{sum(trained.skipped.values())} bad rows skipped, in {seconds:.0f} s"
        )
        if trained.skipped:
            typer.echo(f"skipped: {kinds(trained.skipped)}. These numbers are private: they depend on users' rows")
        if trained.manifest.private_base:
            training = trained.manifest.private_base.training
            typer.echo(
                f"the parts are on a private base, which cost epsilon {stated(training.epsilon)} at delta "
                f"{training.delta:g}; a service charges it once"
            )
        if private := trained.manifest.dp_sgd:
            typer.echo(private.event.guarantee.sentence(stated(private.epsilon), private.delta, None))
