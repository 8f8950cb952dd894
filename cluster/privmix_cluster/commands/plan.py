"""Implements `privmix plan`, which computes what a budget allows and what a setting costs before any training."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from privmix.foundation.errors import InputError
from privmix.foundation.units import DELTA, TOKENS
from privmix.training.options import TrainingOptions
from privmix_cluster.options import JsonOption
from privmix_cluster.parameters import ACCEPTED, bad, count, options, settings_from

plan = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@plan.command("plan", context_settings=ACCEPTED)
def plan_(
    context: typer.Context,
    parts: Annotated[
        int | None,
        typer.Option(min=1, help="The number of parts N. With --users, the default is a proposal."),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="The protocol. Default: pmixed; with --users, PMixED or the exponential mechanism."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(parser=count, metavar="TOKENS", help="The number of tokens that the budget must last for.")
    ] = TOKENS,
    epsilon: Annotated[float | None, typer.Option(help="The epsilon of the budget.")] = None,
    delta: Annotated[float, typer.Option(help="The delta of the budget.")] = DELTA,
    base_epsilon: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="With --parts: the epsilon that `privmix train-base` spends on a private base under the parts. "
            "The budget pays it once, and what it leaves pays for the tokens.",
        ),
    ] = None,
    orders: Annotated[str | None, typer.Option(help="The real Rényi orders to print, such as 1.5,2,3.")] = None,
    users: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="USERS",
            help="The number of users of a corpus. The command proposes parts, protocol and radius.",
        ),
    ] = None,
    corpus_tokens: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="TOKENS",
            help="With --users: the number of tokens of the corpus, to compute the gain in nats.",
        ),
    ] = None,
    part_kind: Annotated[
        str | None,
        typer.Option(
            help="With --users: what a part is, `reader` or `text` as for `privmix train`. Default: with "
            "--corpus-tokens the better one, otherwise reader."
        ),
    ] = None,
    as_json: JsonOption = False,
    plot: Annotated[Path | None, typer.Option(help="The picture file for a plot of epsilon over tokens.")] = None,
) -> None:
    """Compute the radius that a budget allows, or the epsilon that a radius costs.

    Any parameter of the protocol is an option: --q 0.03 --mollifier ratio. `privmix protocols` lists them. With --users
    the command proposes parts, protocol and radius, and prints the expected gain as a range over public texts; with
    --corpus-tokens also which share of epsilon a private base should get.
    """
    from privmix.privacy.protocols import DEFAULT
    from privmix.training.expectation import Population, Requirements, propose
    from privmix.training.splitting import divide
    from privmix_cluster.work.plan import (
        IndividualComparison,
        SplitBudget,
        base_event,
        parse_orders,
        plan_protocol,
        plot_plan,
        proposal_record,
        show_plan,
        show_proposal,
        token_budget,
    )

    if users is not None:
        _refuse_with_users(context.args, orders, plot, base_epsilon)
        budget = token_budget(8.0 if epsilon is None else epsilon, delta, tokens)
        kind = None if part_kind is None else TrainingOptions.checked(part_kind=part_kind).part_kind
        wanted = Requirements(Population(users, corpus_tokens), budget, protocol, parts, kind)
        proposal = propose(wanted)
        compared: list[IndividualComparison | SplitBudget] = []
        if protocol is None:
            with suppress(InputError):  # a budget can be too small for accounts
                compared.append(IndividualComparison.of(wanted, proposal))
        if (division := divide(wanted, proposal)) is not None:
            compared.append(SplitBudget(division))
        if as_json:
            record = proposal_record(proposal, users, corpus_tokens)
            print(json.dumps(record | {key: own for each in compared for key, own in each.record().items()}, indent=2))
        else:
            show_proposal(proposal, users)
            for each in compared:
                Console().print(escape(each.sentence))
        return
    for name, value in (("corpus-tokens", corpus_tokens), ("part-kind", part_kind)):
        if value is not None:
            raise bad(name, "needs --users")
    if parts is None:
        raise bad("parts", "is missing; give the number of parts, or --users for a proposal")
    protocol = protocol or DEFAULT
    parameters: dict[str, object] = {**options(context.args), "tokens": tokens, "delta": delta}
    if epsilon is not None:
        parameters["epsilon"] = epsilon
    settings = settings_from(protocol, parameters)
    if base_epsilon is not None:
        settings = settings.on_base(base_event(base_epsilon, settings))
    result = plan_protocol(settings, parts, None if orders is None else parse_orders(orders))
    if plot is not None:
        plot_plan(result, plot)
    if as_json:
        print(json.dumps(result.record(), indent=2))
    else:
        show_plan(result)


def _refuse_with_users(
    arguments: Sequence[str], orders: str | None, plot: Path | None, base_epsilon: float | None
) -> None:
    given = {**options(arguments), "orders": orders, "plot": plot, "base-epsilon": base_epsilon}
    for name, value in given.items():
        if value is not None:
            raise bad(name, "is not used with --users; use it with --parts")
