"""Computes the probability that a mechanism releases the attacker's target tokens."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from privmix.budget.privacy_budget import PrivacyBudget
from privmix.laboratory.audit.frequencies import draw_law
from privmix.laboratory.audit.local_models import ModelOutput
from privmix.laboratory.evaluation.in_memory import InMemoryBudget
from privmix.privacy.arrays import Reals
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Protocol, Release
from privmix.privacy.protocols.public import Public
from privmix.privacy.settings import Settings

End = Callable[[Reals, Reals], None]
"""Given the probabilities and losses of all queries, replaces the probabilities after the budget's end in place."""

_BATCH = 512


def next_token_chances(
    protocol: Protocol, outputs: ModelOutput, models: Sequence[int], draws: int, end: End | None = None
) -> Reals:
    """Returns the probability of the target token of each query, over draws of parts and of noise, float64 [S].

    Uses the closed form if the protocol has one; otherwise averages over `draws` draws.

    Args:
        draws: the number of releases to average if releases vary.
        end: applies the end of the budget to each draw. Every draw starts with a full budget.
    """
    exact = _exact_chances(protocol, outputs, models)
    if exact is not None:
        return exact
    repeated = draws if varies(protocol) else 1
    total = np.zeros(len(outputs.wanted))
    for _ in range(repeated):
        chances, losses = release_chances(protocol, outputs, models)
        if end is not None and losses is not None:
            end(chances, losses)
        total += chances / repeated
    return total


def end_of_budget(
    settings: Settings | None,
    protocol: Protocol,
    outputs: ModelOutput,
    models: Sequence[int],
    length: int,
    rounds: int = 1,
) -> End | None:
    """Returns a function that lets the public model answer a text's tokens after the end of the text's own budget.

    Args:
        settings: the settings of the budget; None without a budget.
        length: the number of tokens of a text; the queries of a text are adjacent.
        rounds: the number of rounds over all tokens of a text.

    Returns:
        None if the cost of a token does not depend on the text.
    """
    if settings is None or not protocol.event.measured:
        return None
    terms = PrivacyBudget.of("audit", settings, protocol)
    public, _ = release_chances(Public(protocol.parts), outputs, models)

    def end(chances: Reals, losses: Reals) -> None:
        for start in range(0, len(chances), length):
            text = slice(start, start + length)
            paid = InMemoryBudget(terms, protocol.event).charge(losses[text].tolist() * rounds)
            private = (paid // length + (np.arange(length) < paid % length)) / rounds
            chances[text] = private * chances[text] + (1 - private) * public[text]

    return end


def release_chances(protocol: Protocol, outputs: ModelOutput, models: Sequence[int]) -> tuple[Reals, Reals | None]:
    """Releases once for each query; returns the target tokens' probabilities, float64 [S], and the losses."""
    chances, losses = [], []
    for start in range(0, len(outputs.wanted), _BATCH):
        block = slice(start, start + _BATCH)
        released = release(protocol, outputs, models, block)
        weights = released.weights.double()
        chances.append((weights.gather(1, outputs.wanted[block, None])[:, 0] / weights.sum(dim=1)).numpy())
        losses += [] if released.losses is None else [released.losses]
    return np.concatenate(chances), np.concatenate(losses) if losses else None


def _exact_chances(protocol: Protocol, outputs: ModelOutput, models: Sequence[int]) -> Reals | None:
    all_models, chances = tuple(range(protocol.models)), []
    for start in range(0, len(outputs.wanted), _BATCH):
        block = slice(start, start + _BATCH)
        public, rows = outputs.public[block], outputs.models[list(models), block]
        law = protocol.law(shape(public, rows.transpose(0, 1).flatten(0, 1), [all_models] * len(public)))
        if law is None:
            return None
        chances.append(law.gather(1, outputs.wanted[block, None])[:, 0].numpy())
    return np.asarray(np.concatenate(chances))


def release(protocol: Protocol, outputs: ModelOutput, models: Sequence[int], block: slice) -> Release:
    """Draws parts for each query of a block and releases once."""
    public, rows = outputs.public[block], outputs.models[:, block]
    drawn = [protocol.draw() for _ in range(len(public))]
    drawn_rows = [rows[models[part], query] for query, parts in enumerate(drawn) for part in parts]
    return protocol.distribution(shape(public, torch.stack(drawn_rows) if drawn_rows else public[:0], drawn))


def varies(protocol: Protocol) -> bool:
    """Tells whether repeated releases of a query differ."""
    return protocol.noisy or draw_law(protocol).repeated < 1
