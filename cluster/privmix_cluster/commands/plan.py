"""Implements `privmix plan`, which computes what a budget allows and what a setting costs before any training."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from privmix.foundation.units import DELTA, EPSILON, TOKENS
from privmix.training.options import TokenBudget, TrainingOptions
from privmix_cluster.options import JsonOption
from privmix_cluster.parameters import SetOption, bad, count, fields, settings_from

if TYPE_CHECKING:
    from privmix.privacy.accounting import planning
    from privmix.privacy.protocol import Protocol
    from privmix.privacy.settings import Settings
    from privmix.training.expectation import Range
    from privmix.training.splitting import Division

EXACT_DECIMALS = 9
"""The digits of an epsilon in JSON, which is rounded up: more digits would show rounding errors."""

COMMANDS = """\
  privmix {train}
  printf '%s\\n' 'ensemble: ensemble' 'budget: {{ledger: ledger.db}}' \\
    'privacy: {privacy}' > privmix.yaml
  privmix serve --config privmix.yaml"""


def plan(
    parts: Annotated[
        int | None,
        typer.Option(min=1, help="The number of parts N. With --users, the default is a proposal."),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(help="The protocol. Default: pmixed; with --users, pmixed or exponential mechanism."),
    ] = None,
    tokens: Annotated[
        int, typer.Option(parser=count, metavar="TOKENS", help="The number of tokens that the budget must last for.")
    ] = TOKENS,
    epsilon: Annotated[float | None, typer.Option(help="The epsilon of the budget.")] = None,
    delta: Annotated[float, typer.Option(help="The delta of the budget.")] = DELTA,
    given: SetOption = None,
    users: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="USERS",
            help="About how many users a corpus has. The command proposes how to train and serve it. The number of "
            "parts that follows becomes public, so round the number.",
        ),
    ] = None,
    corpus_tokens: Annotated[
        int | None,
        typer.Option(
            parser=count,
            metavar="TOKENS",
            help="With --users: its number of tokens, from which gains in nats follow, also of a private base.",
        ),
    ] = None,
    part_kind: Annotated[
        str | None,
        typer.Option(
            help="With --users: what a part is, `reader`, `lora` or `text` as for `privmix train`. Default: with "
            "--corpus-tokens the better one, otherwise reader."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compute the radius that a budget allows, or the epsilon that a radius costs.

    `privmix protocols` lists the fields that --set takes. With --users the command prints the commands of the best way
    to spend the budget, by gains that were measured on public texts, and compares it with other ways.
    """
    from privmix.privacy.protocols import DEFAULT
    from privmix.training.expectation import Population, Requirements
    from privmix.training.splitting import alternatives

    if users is not None:
        if given:
            raise bad("set", "is not used with --users; use it with --parts")
        budget = TokenBudget.checked(epsilon=EPSILON if epsilon is None else epsilon, delta=delta, tokens=tokens)
        kind = None if part_kind is None else TrainingOptions.checked(part_kind=part_kind).part_kind
        ways = alternatives(Requirements(Population(users, corpus_tokens), budget, protocol, parts, kind))
        size = {"users": users, "corpus_tokens": corpus_tokens, **budget.model_dump()}
        record = {**size, "plans": [_way(way, budget) for way in ways], **_expectation(ways)}
        print(json.dumps(record, indent=2)) if as_json else _show_ways(record)
        return
    for name, value in (("corpus-tokens", corpus_tokens), ("part-kind", part_kind)):
        if value is not None:
            raise bad(name, "needs --users")
    if parts is None:
        raise bad("parts", "is missing; give the number of parts, or --users for a proposal")
    parameters: dict[str, object] = {"tokens": tokens, "delta": delta, **fields(given)}
    if epsilon is not None:
        parameters["epsilon"] = epsilon
    settings = settings_from(protocol or DEFAULT, parameters)
    planned, cost = _planned(settings, parts)
    if as_json:
        print(json.dumps(_record(settings, planned, cost), indent=2))
    else:
        _show(settings, planned, cost)


def _planned(settings: "Settings", parts: int) -> "tuple[Protocol, planning.Cost | None]":
    """Plans a protocol and computes the cost of all tokens; None if there is no bound that holds for all texts.

    Raises:
        typer.BadParameter: the budget and the derived parameter are both given or both missing, or no plan exists.
    """
    from privmix.privacy import accounting
    from privmix.privacy.accounting import planning

    derived = settings.derived
    chosen = derived is not None and getattr(settings, derived) is not None
    if derived and settings.enforced == "bound" and chosen == ("epsilon" in settings.model_fields_set):
        raise bad("epsilon", f"give either --epsilon, to plan the {derived}, or --set {derived}=VALUE, to evaluate one")
    try:
        protocol = settings.plan(parts)
    except ValueError as error:
        raise bad((f"set {derived}" if chosen else "epsilon") if derived else "parts", str(error)) from error
    event = protocol.event
    known = accounting.ORDERS if protocol.order is None or event.measured else [protocol.order]
    bounded = any(map(math.isfinite, event.rdp(known)))
    return protocol, planning.cost(event, settings.tokens, settings.delta, known) if bounded else None


def _record(settings: "Settings", protocol: "Protocol", cost: "planning.Cost | None") -> dict[str, Any]:
    """Returns the JSON output of a plan for a number of parts."""
    return {
        **settings.derived_from(protocol),
        **settings.details(protocol),
        "epsilon_rdp": _exact(cost.epsilon_rdp if cost else None),
        "epsilon_pld": _exact(cost.epsilon_pld if cost else None),
        "best_order": cost.best_order if cost else None,
        "adjacency": protocol.guarantee.adjacency,
        "guarantee": protocol.guarantee.status,
        "statement": _sentence(settings, protocol, cost),
    }


def _sentence(settings: "Settings", protocol: "Protocol", cost: "planning.Cost | None") -> str:
    return settings.sentence(protocol.guarantee, cost.epsilon if cost else None, settings.tokens)


def _show(settings: "Settings", protocol: "Protocol", cost: "planning.Cost | None") -> None:
    console, adjacency = Console(), protocol.guarantee.adjacency
    title = f"{settings.tokens} tokens at delta {settings.delta:g} from {protocol.parts} parts: {settings.protocol}"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, value in settings.derived_from(protocol).items():
        table.add_row(name, f"{value:.6f}", escape(str(type(settings).model_fields[name].description)))
    if cost is None:
        table.add_row("epsilon", "-", "no data-independent bound")
    else:
        table.add_row("epsilon", _shown(cost.epsilon_rdp), f"{adjacency}: Rényi, at order {cost.best_order:.4g}")
        table.add_row("", _shown(cost.epsilon_pld), f"{adjacency}: privacy loss distribution")
    for name, value in settings.details(protocol).items():
        for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            table.add_row(f"{name} {key}".strip(), f"{number:.6g}" if isinstance(number, float) else str(number), "")
    console.print(table)
    console.print(escape(_sentence(settings, protocol, cost)), style="dim")


def _way(way: "Division", budget: TokenBudget) -> dict[str, Any]:
    """Returns the JSON output of one way to spend a budget."""
    import yaml

    from privmix.privacy import accounting
    from privmix.privacy.protocols.dp_sgd import DpSgdSettings

    epsilon = accounting.stated(budget.epsilon)
    record = {
        "base_share": way.share,
        "gain": _range(way.gain),
        "of_the_base": sum(way.base.values()) / len(way.base) if way.base else None,
    }
    if way.parts is None:
        guarantee = DpSgdSettings().plan(1).guarantee
        train = f"train-base CORPUS --output ensemble --epsilon {epsilon} --delta {budget.delta:g}"
        return {
            **record,
            "protocol": "dp-sgd",
            "rows_a_token": 1,
            "statement": guarantee.sentence(epsilon, budget.delta, None),
            "commands": COMMANDS.format(train=train, privacy="{protocol: dp-sgd}"),
        }
    settings, protocol, kind = way.parts.settings, way.parts.protocol, way.parts.part_kind
    rows = protocol.models if kind == "lora" else protocol.rows  # plain LoRA reads every token, drawn or not
    train = f"train CORPUS --output ensemble --parts {protocol.parts} --part-kind {kind}"
    if way.share:
        train += f" --base auto --base-share {way.share:g} --epsilon {epsilon} --delta {budget.delta:g}"
    privacy = settings.model_dump(include={"protocol", "q", "sample", "epsilon", "delta", "tokens"})
    listed = yaml.safe_dump(privacy, default_flow_style=True, width=math.inf).strip()
    return {
        **record,
        "parts": protocol.parts,
        "part_kind": kind,
        "protocol": settings.protocol,
        "parameters": dict(way.parts.parameters),
        "radius": way.parts.radius,
        "rows_a_token": None if rows is None else rows + 1,  # with the public model's
        "share_kept": _range(way.parts.kept),
        "horizon": settings.horizon,
        "statement": protocol.guarantee.sentence(epsilon, budget.delta, budget.tokens),
        "commands": COMMANDS.format(train=train, privacy=listed),
    }


def _expectation(ways: "Sequence[Division]") -> dict[str, Any]:
    """Returns where the expectations come from, and the cases that they do not cover."""
    from privmix.training import expectation, splitting

    proposals = [way.parts for way in ways if way.parts is not None]
    sources = [expectation.Measured.load(each.part_kind).source(each.settings.protocol) for each in proposals]
    leaves_out = [*expectation.LEAVES_OUT]
    leaves_out += [expectation.PLAIN_LORA] * any(each.part_kind == "lora" for each in proposals)
    if any(way.share for way in ways):
        sources.append(splitting.MeasuredBases.load().source)
        leaves_out += splitting.LEAVES_OUT
    return {"sources": list(dict.fromkeys(sources)), "leaves_out": leaves_out}


def _show_ways(record: Mapping[str, Any]) -> None:
    from privmix.privacy import accounting

    console, best = Console(highlight=False), record["plans"][0]
    budget = f"{record['tokens']:,} tokens at epsilon {accounting.stated(record['epsilon'])}, delta {record['delta']:g}"
    console.print(f"[bold]For {record['users']:,} users and {budget}: {_name(best)}[/]")
    print(f"\n{best['commands']}\n")
    unit = "share of the gain without privacy" if best["gain"] is None else "nats per token over the public model"
    table = Table(title=f"All ways, the best first. Gain: {unit}.", title_justify="left")
    for name in ("", "gain", "protocol", "radius", "rows", "tokens"):
        table.add_column(name)
    for way in record["plans"]:
        rows = "drawn" if way["rows_a_token"] is None else f"{way['rows_a_token']:,}"
        tokens = "any" if "parts" not in way else f"{record['tokens']:,}{', then fading' * bool(way['horizon'])}"
        radius = f"{way['radius']:.4g}" if "radius" in way else ""
        table.add_row(_name(way), _gain(way), way["protocol"], radius, rows, tokens)
    console.print(table)
    if best["gain"] is not None:
        change = [f"{math.expm1(-best['gain'][which]):+.0%}" for which in ("mean", "low", "high")]
        console.print(f"The best changes perplexity by {change[0]} ({change[1]} to {change[2]}).")
    console.print("A radius is the most that a part changes a log-probability. Rows are of models, for a token.")
    for source in record["sources"]:
        console.print(escape(f"Gain: {source}."), style="dim")
    console.print(escape("It leaves out: " + "; ".join(record["leaves_out"]) + "."), style="dim")
    console.print(escape(best["statement"]), style="dim")


def _name(way: Mapping[str, Any]) -> str:
    if "parts" not in way:
        return "private base alone"
    parts = f"{way['parts']:,} {'texts' if way['part_kind'] == 'text' else 'adapters'}"
    return f"private base ({way['base_share']:.0%} of epsilon) and {parts}" if way["base_share"] else parts


def _gain(way: Mapping[str, Any]) -> str:
    """Returns what a way gains over the public model, or the share that it keeps of a gain that is unknown."""
    form = "{mean:.0%} ({low:.0%} to {high:.0%})" if way["gain"] is None else "{mean:.2f} ({low:.2f} to {high:.2f})"
    return form.format(**way["gain"] or way["share_kept"])


def _range(found: "Range | None") -> dict[str, float] | None:
    return None if found is None else asdict(found)


def _exact(epsilon: float | None) -> float | None:
    from privmix.privacy import accounting

    return None if epsilon is None else accounting.round_up(epsilon, EXACT_DECIMALS)


def _shown(epsilon: float | None) -> str:
    from privmix.privacy import accounting

    return "-" if epsilon is None else accounting.shown(epsilon)
