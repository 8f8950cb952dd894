"""The chance that a mechanism releases the tokens that an attacker hopes for."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from services.audit.attacks.frequencies import draw_law
from services.audit.worlds.models import ModelOutput
from services.budget.in_memory import InMemoryBudget
from services.budget.privacy_budget import PrivacyBudget
from services.privacy.mollifiers.shaping import shape
from services.privacy.protocol import Protocol, Release
from services.privacy.protocols.public import Public
from services.privacy.settings import Settings
from services.privacy.worlds import Reals

End = Callable[[Reals, Reals], None]
"""Replaces chances by the public model's from where a budget ends, given the chances and the losses of each query."""

_AT_ONCE = 512


def next_token_chances(
    protocol: Protocol, outputs: ModelOutput, models: Sequence[int], draws: int, end: End | None = None
) -> Reals:
    """float64 [S]: the chance of the token wanted in each query, over the draws of parts and of noise.

    The protocol's law gives it where the law has a closed form; elsewhere it is the mean over `draws` draws.

    Args:
        draws: how often a query is answered where its answers differ.
        end: of a budget that each draw begins anew.
    """
    known = _law_chances(protocol, outputs, models)
    if known is not None:
        return known
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
    """Lets the public model answer each text from where a budget of its own ends.

    Args:
        settings: of the budget; None where there is none.
        length: tokens of a text, which stand together.
        rounds: how often a text is asked about, all its places in each.

    Returns:
        None where what a token costs does not depend on the text.
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
    """Returns for one release of each query the chance of the token wanted, float64 [S], and the losses."""
    chances, losses = [], []
    for start in range(0, len(outputs.wanted), _AT_ONCE):
        block = slice(start, start + _AT_ONCE)
        released = release(protocol, outputs, models, block)
        weights = released.weights.double()
        chances.append((weights.gather(1, outputs.wanted[block, None])[:, 0] / weights.sum(dim=1)).numpy())
        losses += [] if released.losses is None else [released.losses]
    return np.concatenate(chances), np.concatenate(losses) if losses else None


def _law_chances(protocol: Protocol, outputs: ModelOutput, models: Sequence[int]) -> Reals | None:
    everyone, chances = tuple(range(protocol.models)), []
    for start in range(0, len(outputs.wanted), _AT_ONCE):
        block = slice(start, start + _AT_ONCE)
        public, rows = outputs.public[block], outputs.models[list(models), block]
        law = protocol.law(shape(public, rows.transpose(0, 1).flatten(0, 1), [everyone] * len(public)))
        if law is None:
            return None
        chances.append(law.gather(1, outputs.wanted[block, None])[:, 0].numpy())
    return np.asarray(np.concatenate(chances))


def release(protocol: Protocol, outputs: ModelOutput, models: Sequence[int], block: slice) -> Release:
    """Draws for each query of a block, and releases once."""
    public, rows = outputs.public[block], outputs.models[:, block]
    drawn = [protocol.draw() for _ in range(len(public))]
    asked = [rows[models[part], query] for query, parts in enumerate(drawn) for part in parts]
    parts = torch.stack(asked) if asked else public[:0]
    return protocol.release(shape(public, parts, drawn))


def varies(protocol: Protocol) -> bool:
    """Whether the same query is answered by different distributions."""
    return protocol.noisy or draw_law(protocol).repeated < 1
