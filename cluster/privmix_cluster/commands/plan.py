"""Implements `privmix plan`, which computes what a budget allows and what a setting costs before any training."""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from privmix.foundation.errors import InputError
from privmix.foundation.units import DELTA, TOKENS
from privmix.training.options import DpSgdOptions, TrainingOptions
from privmix_cluster.options import JsonOption
from privmix_cluster.parameters import ACCEPTED, bad, count, options, settings_from, token_budget

if TYPE_CHECKING:
    from privmix.privacy.accounting import planning
    from privmix.privacy.events import Divergences, Event
    from privmix.privacy.protocol import Protocol
    from privmix.privacy.protocols.dp_sgd import DpSgdEvent
    from privmix.privacy.settings import Settings
    from privmix.training.expectation import Proposal, Requirements
    from privmix.training.splitting import Division

EXACT_DECIMALS = 9
"""The digits of an epsilon in JSON, which is rounded up: more digits would show rounding errors."""
SHOWN_ORDERS = (1.5, 2.0, 3.0, 5.0, 9.0, 17.0, 33.0, 65.0)
"""The default orders of the printed table."""

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
) -> None:
    """Compute the radius that a budget allows, or the epsilon that a radius costs.

    Any parameter of the protocol is an option: --q 0.03 --mollifier ratio. `privmix protocols` lists them. With --users
    the command proposes parts, protocol and radius, and prints the expected gain as a range over public texts; with
    --corpus-tokens also which share of epsilon a private base should get.
    """
    from privmix.privacy.protocols import DEFAULT
    from privmix.training.expectation import Population, Requirements, propose
    from privmix.training.splitting import divide

    if users is not None:
        _refuse_with_users(context.args, orders, base_epsilon)
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
            record = _proposal_record(proposal, users, corpus_tokens)
            print(json.dumps(record | {key: own for each in compared for key, own in each.record().items()}, indent=2))
        else:
            _show_proposal(proposal, users)
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
        settings = settings.on_base(_base_event(base_epsilon, settings))
    result = _plan_protocol(settings, parts, None if orders is None else _parse_orders(orders))
    if as_json:
        print(json.dumps(result.record(), indent=2))
    else:
        _show_plan(result)


def _refuse_with_users(arguments: Sequence[str], orders: str | None, base_epsilon: float | None) -> None:
    given = {**options(arguments), "orders": orders, "base-epsilon": base_epsilon}
    for name, value in given.items():
        if value is not None:
            raise bad(name, "is not used with --users; use it with --parts")


@dataclass(frozen=True)
class Plan:
    """Holds the result of planning one protocol.

    `cost` is the cost of all tokens; None if there is no data-independent bound. `orders` are the orders to print.
    """

    settings: "Settings"
    protocol: "Protocol"
    cost: "planning.Cost | None"
    orders: Sequence[float]
    sentence: str

    @property
    def event(self) -> "Event":
        return self.protocol.event

    @property
    def base(self) -> dict[str, Any] | None:
        """What the private base costs alone, and what the budget would allow without it; None without a base."""
        from privmix.privacy.accounting import planning

        for event in self.settings.spent_before:
            alone = self.settings.on_base(None).plan(self.protocol.parts)
            cost = planning.cost(event, 1, self.settings.delta)
            return {
                "epsilon_rdp": _exact(cost.epsilon_rdp),
                "epsilon_pld": _exact(cost.epsilon_pld),
                "tokens_without_it": {**self.settings.derived_from(alone), **self.settings.details(alone)},
            }
        return None

    @property
    def derived(self) -> Mapping[str, float]:
        """The parameter that the budget determines; empty if there is none."""
        return self.settings.derived_from(self.protocol)

    def record(self) -> dict[str, Any]:
        """Returns the JSON output."""
        cost = self.cost
        return {
            **self.derived,
            **self.settings.details(self.protocol),
            **({} if self.base is None else {"base": self.base}),
            "epsilon_rdp": _exact(cost.epsilon_rdp if cost else None),
            "epsilon_pld": _exact(cost.epsilon_pld if cost else None),
            "best_order": cost.best_order if cost else None,
            "adjacency": self.protocol.guarantee.adjacency,
            "rdp_per_token": {"orders": list(self.orders), "values": _finite(self.event.rdp(self.orders))},
            "guarantee": self.protocol.guarantee.status,
            "statement": self.sentence,
        }


@dataclass(frozen=True)
class IndividualComparison:
    """Compares a proposal with individual budgets, `own`, which ask all parts for every token."""

    proposed: "Proposal"
    own: "Proposal"

    @classmethod
    def of(cls, wanted: "Requirements", proposed: "Proposal") -> Self:
        from privmix.training.expectation import propose

        return cls(proposed, propose(replace(wanted, protocol="individual", part_kind=proposed.part_kind)))

    @property
    def better(self) -> bool:
        return self.own.is_better_than(self.proposed)

    @property
    def sentence(self) -> str:
        """The comparison in words."""
        own, other = self.own, self.proposed
        worth, unit = (
            (f"{own.worth:.0%} instead of {other.worth:.0%}", "of the gain without privacy")
            if own.gain is None
            else (f"{own.worth:.2f} instead of {other.worth:.2f}", "nats per token")
        )
        return (
            f"--protocol individual, with {own.protocol.parts:,} parts, L {own.details['lower']:.2g} and a horizon of "
            f"{own.settings.tokens:,} tokens, gives {worth} {unit}, at {_rows(own):,} model rows per token."
        )

    def record(self) -> dict[str, Any]:
        """Returns the JSON output."""
        return {
            "individual": {
                "parts": self.own.protocol.parts,
                **self.own.details,
                "horizon": self.own.settings.horizon,
                "rows_a_token": _rows(self.own),
                "gain_expected": self.own.expectation(),
                "better": self.better,
            }
        }


@dataclass(frozen=True)
class SplitBudget:
    """States the best division of epsilon between a private base and the parts on it."""

    division: "Division"

    @property
    def sentence(self) -> str:
        """The division in words."""
        own = self.division
        expected = own.expectation()
        gain, base, added = (
            f"{expected[name]['mean']:.2f}" for name in ("nats_a_token", "of_the_base", "of_the_parts")
        )
        if not own.share:
            return f"A private base would add nothing to the {gain} nats per token of the ensemble alone."
        if own.parts is None:
            return (
                f"DP-SGD with all of epsilon (privmix train-base) gains {gain} nats per token for any number of "
                "tokens, as much as any ensemble on a private base."
            )
        return (
            f"A private base with {own.share:.0%} of epsilon (privmix train --base auto --base-share {own.share:g}) "
            f"gains {base} nats per token for any number of tokens, and the parts on it {added} more for "
            f"{own.parts.settings.tokens:,}, together {gain}."
        )

    def record(self) -> dict[str, Any]:
        """Returns the JSON output."""
        own = self.division
        return {
            "private_base": {
                "share": own.share,
                "epsilon": own.share * own.epsilon,
                "radius": None if own.parts is None else own.parts.radius,
                "gain_expected": own.expectation(),
            }
        }


def _base_event(epsilon: float, settings: "Settings") -> "DpSgdEvent":
    """Returns the event of a private base by the default recipe of `privmix train-base`."""
    from privmix.training import dp_sgd

    if settings.epsilon is None or not 0 < epsilon < settings.epsilon:
        raise bad("base-epsilon", f"must lie between 0 and the --epsilon of all, got {epsilon:g}")
    return dp_sgd.planned(DpSgdOptions.checked(epsilon=epsilon, delta=settings.delta))


def _proposal_record(proposal: "Proposal", users: int, corpus_tokens: int | None) -> dict[str, Any]:
    from privmix.privacy import accounting

    settings, protocol = proposal.settings, proposal.protocol
    return {
        "parts": protocol.parts,
        "part_kind": proposal.part_kind,
        "radius": proposal.radius,
        "protocol": protocol.name,
        "parameters": {**settings.model_dump(include={"q", "sample"}), **proposal.details},
        "rows_a_token": _rows(proposal),
        "gain_expected": proposal.expectation(),
        "users": users,
        "users_a_part": users / protocol.parts,
        "corpus_tokens": corpus_tokens,
        "epsilon": settings.epsilon,
        "delta": settings.delta,
        "tokens": settings.tokens,
        "horizon": settings.horizon,
        "adjacency": protocol.guarantee.adjacency,
        "guarantee": protocol.guarantee.status,
        "statement": protocol.guarantee.sentence(accounting.stated(settings.epsilon), settings.delta, settings.tokens),
    }


def _rows(proposal: "Proposal") -> int | None:
    """Returns the number of model rows for a token, the public model's included; None if it is drawn."""
    return None if proposal.protocol.rows is None else proposal.protocol.rows + 1


def _show_proposal(proposal: "Proposal", users: int) -> None:
    from privmix.privacy import accounting

    console, record = Console(), _proposal_record(proposal, users, None)
    kept, gain = proposal.kept, proposal.gain
    epsilon = accounting.stated(record["epsilon"])
    title = f"{users:,} users, {record['tokens']:,} tokens at epsilon {epsilon}, delta {record['delta']:g}"
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_row("parts", f"{record['parts']:,}", f"{record['users_a_part']:.0f} users per part on average")
    kind = "a text" if record["part_kind"] == "text" else "an adapter"
    table.add_row("a part is", kind, f"privmix train --part-kind {record['part_kind']}")
    parameters = ", ".join(f"{name} {value:g}" for name, value in record["parameters"].items())
    table.add_row("protocol", record["protocol"], f"{parameters}; {record['rows_a_token']} model rows per token")
    radius = (
        "the maximum change of a token's log-probability by a part, in nats"
        if proposal.settings.horizon is None
        else "comparable with the exponential mechanism's, for tokens of the average cost"
    )
    table.add_row("radius", f"{proposal.radius:.4g}", radius)
    if proposal.settings.horizon is not None:
        table.add_row("horizon", f"{proposal.settings.horizon:,}", "tokens, no limit: then answers fade")
    table.add_row("gain kept", f"{kept.mean:.0%}", f"{kept.low:.0%} to {kept.high:.0%} of the gain without privacy")
    if gain is not None:
        table.add_row(
            "gain", f"{gain.mean:.2f}", f"nats per token over the public model; {gain.low:.2f} to {gain.high:.2f}"
        )
        change = f"{math.expm1(-gain.low):+.0%} to {math.expm1(-gain.high):+.0%}"
        table.add_row("perplexity", f"{math.expm1(-gain.mean):+.0%}", f"from the public model's; {change}")
    console.print(table)
    console.print(escape(f"Gain: {record['gain_expected']['source']}."), style="dim")
    console.print(escape("It leaves out: " + "; ".join(record["gain_expected"]["leaves_out"]) + "."), style="dim")
    console.print(escape(record["statement"]), style="dim")


def _plan_protocol(settings: "Settings", parts: int, orders: Sequence[float] | None) -> Plan:
    """Plans the protocol and computes its cost.

    Raises:
        typer.BadParameter: the budget and the derived parameter are both given or both missing, or no plan exists.
    """
    from privmix.privacy import accounting
    from privmix.privacy.accounting import planning

    derived = settings.derived
    chosen = derived is not None and getattr(settings, derived) is not None
    if derived and settings.enforced == "bound" and chosen == ("epsilon" in settings.model_fields_set):
        raise bad("epsilon", f"give either --epsilon, to plan the {derived}, or --{derived}, to evaluate one")
    try:
        protocol = settings.plan(parts)
    except ValueError as error:
        raise bad((derived if chosen else "epsilon") if derived else "parts", str(error)) from error
    event = protocol.event
    known = accounting.ORDERS.tolist() if protocol.order is None or event.measured else [protocol.order]
    bounded = any(map(math.isfinite, event.rdp(known)))
    before = settings.spent_before
    cost = planning.cost(event, settings.tokens, settings.delta, known, before=before) if bounded else None
    shown = orders or (known if bounded else [protocol.order or SHOWN_ORDERS[1]])
    return Plan(settings, protocol, cost, tuple(shown), _sentence(settings, protocol, cost))


def _sentence(settings: "Settings", protocol: "Protocol", cost: "planning.Cost | None") -> str:
    from privmix.privacy import accounting

    if settings.enforced == "bound" and cost is not None:
        return protocol.guarantee.sentence(accounting.shown(cost.epsilon), settings.delta, settings.tokens)
    if settings.enforced == "bound":
        return protocol.guarantee.sentence(accounting.stated(settings.epsilon), settings.delta, None)
    return protocol.guarantee.stopped_by_losses(accounting.stated(settings.epsilon), settings.delta)


def _show_plan(result: Plan) -> None:
    console, settings, cost = Console(), result.settings, result.cost
    adjacency = result.protocol.guarantee.adjacency
    title = (
        f"{settings.tokens} tokens at delta {settings.delta:g} from {result.protocol.parts} parts: {settings.protocol}"
    )
    table = Table(title=title, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, value in result.derived.items():
        table.add_row(name, f"{value:.6f}", escape(str(type(settings).model_fields[name].description)))
    if cost is None:
        table.add_row("epsilon", "-", "no data-independent bound")
    else:
        table.add_row("epsilon", _shown(cost.epsilon_rdp), f"{adjacency}: Rényi, at order {cost.best_order:.4g}")
        table.add_row("", _shown(cost.epsilon_pld), f"{adjacency}: privacy loss distribution")
    for name, value in settings.details(result.protocol).items():
        for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            table.add_row(f"{name} {key}".strip(), f"{number:.6g}" if isinstance(number, float) else str(number), "")
    if (base := result.base) is not None:
        table.add_row("base", f"{base['epsilon_pld']:.4f}", "its epsilon alone; it is part of the sum above, once")
        for name, number in base["tokens_without_it"].items():
            table.add_row(f"{name} without it", f"{number:.6g}", "")
    console.print(table)
    if cost is not None and len(result.orders) > 1:
        console.print(_losses(result))
    console.print(escape(result.sentence), style="dim")


def _losses(result: Plan) -> Table:
    from privmix.privacy import accounting

    what = "all tokens" if result.event.once else "a token"
    table = Table(title=f"Rényi loss of {what}", title_justify="left")
    for name in ("order", "loss"):
        table.add_column(name, justify="right")
    orders = result.orders if len(result.orders) < len(accounting.ORDERS) else SHOWN_ORDERS
    for order, loss in zip(orders, result.event.rdp(orders), strict=True):
        table.add_row(f"{order:g}", f"{loss:.6g}")
    return table


def _parse_orders(orders: str) -> tuple[float, ...]:
    try:
        values = tuple(float(order) for order in orders.split(","))
    except ValueError as error:
        raise bad("orders", f"must be numbers separated by commas, got {orders!r}") from error
    if not all(1 < value < math.inf for value in values):
        raise bad("orders", f"must be finite numbers above 1, got {orders}")
    return values


def _finite(divergences: "Divergences") -> list[float | None]:
    return [float(value) if math.isfinite(value) else None for value in divergences]


def _exact(epsilon: float | None) -> float | None:
    from privmix.privacy import accounting

    return None if epsilon is None else accounting.round_up(epsilon, EXACT_DECIMALS)


def _shown(epsilon: float | None) -> str:
    from privmix.privacy import accounting

    return "-" if epsilon is None else accounting.shown(epsilon)
