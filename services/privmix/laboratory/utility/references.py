"""Implements two published mechanisms that write synthetic text from references in prompts, to compare with.

- InvisibleInk (Vinod, Pillutla, Thakurta, NeurIPS 2025; arXiv 2507.02974): difference clipping and top-k+ sampling.
- Amin et al. (EMNLP 2024; arXiv 2407.12108): clipped logits, and predictions of the public model alone by the sparse
  vector technique.

Each batch has B references, one for a user, and no user is in two. So the budget of all texts is that of one batch:
epsilon and delta for a user's texts, replaced by any others that leave all other references where they are
(`reference_texts.batches`). The papers count a reference that is added or removed, which halves each sensitivity below.
"""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from scipy.optimize import bisect
from torch import Tensor

from privmix.foundation.errors import InputError
from privmix.privacy import accounting
from privmix.privacy.accounting.bounded_range import bounded_range_rdp

_MIN_EPSILON, _MAX_EPSILON = 1e-4, 100.0  # nats


@dataclass(frozen=True)
class InvisibleInk:
    """Clips how far each reference moves a logit from the public model's, and samples from the public top-k+.

    Attributes:
        clip: C, in logits.
        temperature: tau.
        top_k: k; the vocabulary's size for no truncation.
    """

    clip: float
    temperature: float = 1.1
    top_k: int = 100
    ended: ClassVar[bool] = False  # a text ends by its tokens

    @classmethod
    def plan(
        cls, references: int, tokens: int, epsilon: float, delta: float, temperature: float = 1.1, top_k: int = 100
    ) -> "InvisibleInk":
        """Returns the mechanism with the largest clip for texts of `tokens` tokens from `references` references.

        Raises:
            InputError: the budget does not last.
        """
        clip = _largest_clip(references, tokens, epsilon, delta, temperature, by_token=0.0)
        return cls(clip, temperature, top_k)

    def next_token(self, public: Tensor, rows: Tensor) -> Tensor:
        """Returns the probabilities of the next token [V], from logits of the public model [V] and references [B, V].

        Replacing a reference moves a mean of clipped differences by at most 2 C / B, so the log-ratio of two
        probabilities by at most 4 C / (B tau).
        """
        moved = public + (rows - public).clamp(-self.clip, self.clip).mean(dim=0)
        kept = self.kept(public, len(rows))
        return (moved / self.temperature).masked_fill(~kept, -math.inf).softmax(dim=-1)

    def kept(self, public: Tensor, references: int) -> Tensor:
        """Returns the public top-k+: the tokens at most 2 C / B below the k-th largest public logit, bool [V].

        It does not depend on the references, and so has no cost.
        """
        threshold = public.topk(min(self.top_k, len(public))).values[-1] - 2 * self.clip / references
        return public >= threshold


@dataclass
class Amin:
    """Samples from the mean of clipped logits where it is far from the public model's, otherwise from the latter.

    Whether it is far is told by AboveThreshold (Dwork & Roth 2014, Algorithm 1), which begins anew after each private
    token: Laplace noise of scale sigma on the threshold, and of 2 sigma on each distance. Public tokens cost nothing.

    Attributes:
        clip: C, in logits.
        private_tokens: the largest number of private tokens of a batch, which writes one text after the other until
            they are spent; the last is cut there.
        threshold, sigma: theta and the scale of its noise.
        rng: the source of the noise. This is a reference for comparison; it protects nobody's text.
    """

    clip: float
    private_tokens: int
    temperature: float = 1.0
    public_temperature: float = 1.0
    threshold: float = 0.5
    sigma: float = 0.2
    rng: np.random.Generator = field(default_factory=np.random.default_rng)
    spent: int = 0

    def __post_init__(self) -> None:
        self._begin()

    @classmethod
    def plan(
        cls,
        references: int,
        private_tokens: int,
        epsilon: float,
        delta: float,
        *,
        threshold: float = 0.5,
        sigma: float = 0.2,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> "Amin":
        """Returns the mechanism for one batch with the largest clip.

        Raises:
            InputError: the budget does not last.
        """
        # Pure differential privacy with epsilon is zCDP with epsilon^2 / 2 (Bun & Steinke 2016, Proposition 1.4).
        by_token = svt_epsilon(references, sigma) ** 2 / 2
        clip = _largest_clip(references, private_tokens, epsilon, delta, temperature, by_token)
        rng = np.random.default_rng(seed)
        return cls(clip, private_tokens, temperature, threshold=threshold, sigma=sigma, rng=rng)

    @property
    def ended(self) -> bool:
        return self.spent >= self.private_tokens

    def next_token(self, public: Tensor, rows: Tensor) -> Tensor:
        """Returns the probabilities of the next token [V], from logits of the public model [V] and references [B, V].

        Raises:
            ValueError: the private tokens are spent.
        """
        if self.ended:
            raise ValueError("all private tokens are spent")
        if distance(public, rows) + self.rng.laplace(scale=2 * self.sigma) <= self._noisy_threshold:
            return (public / self.public_temperature).softmax(dim=-1)
        self.spent += 1
        self._begin()
        return self.private(rows)

    def private(self, rows: Tensor) -> Tensor:
        """Returns the softmax of the mean of the logits, each row shifted to the maximum C and cut at -C.

        Replacing a reference moves the mean by at most 2 C / B, as in InvisibleInk.
        """
        shifted = rows - rows.amax(dim=-1, keepdim=True) + self.clip
        return (shifted.clamp(-self.clip, self.clip).mean(dim=0) / self.temperature).softmax(dim=-1)

    def _begin(self) -> None:
        self._noisy_threshold = self.threshold + self.rng.laplace(scale=self.sigma)


def distance(public: Tensor, rows: Tensor) -> float:
    """Returns the L1 distance of the references' mean distribution from the public model's.

    Replacing one of B references moves it by at most 2 / B. The distribution of the clipped mean of logits has no such
    bound.
    """
    return float((rows.softmax(dim=-1).mean(dim=0) - public.softmax(dim=-1)).abs().sum())


def svt_epsilon(references: int, sigma: float) -> float:
    """Returns the epsilon of one run of AboveThreshold: Delta / sigma + 2 Delta / (2 sigma), with Delta = 2 / B."""
    return 4 / (references * sigma)


def _largest_clip(
    references: int, tokens: int, epsilon: float, delta: float, temperature: float, by_token: float
) -> float:
    """Returns the largest C for which a batch stays within (epsilon, delta).

    Args:
        tokens: the number of tokens that are sampled from the references.
        by_token: zCDP that each of them costs besides.
    """
    orders = accounting.ORDERS

    def excess(clip: float) -> float:
        divergences = bounded_range_rdp(orders, 4 * clip / (references * temperature)) + np.asarray(orders) * by_token
        return accounting.epsilon(tokens * divergences, delta, orders).epsilon - epsilon

    if excess(_MIN_EPSILON) > 0:
        raise InputError(
            f"epsilon {epsilon:g} does not last for {tokens} tokens of {references} references; use more references, "
            "fewer tokens or, for the sparse vector technique, a larger sigma"
        )
    return (
        _MAX_EPSILON
        if excess(_MAX_EPSILON) <= 0
        else float(bisect(excess, _MIN_EPSILON, _MAX_EPSILON, xtol=1e-9)) - 2e-9
    )
