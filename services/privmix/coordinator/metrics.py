"""Exports the coordinator's Prometheus metrics through Ray: counts and times only, no model output."""

from collections.abc import Sequence
from typing import NamedTuple

from privmix.foundation.metrics import EnsembleMetrics

SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
SIZES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]


class Released(NamedTuple):
    """Describes a released token.

    Attributes:
        waited_s: the time since the sequence's previous token, or since its submission if the token is the `first`.
        public: the public model alone answered.
    """

    waited_s: float
    first: bool
    public: bool


class CoordinatorMetrics:
    """Records the metrics of a coordinator. Rows are a total, so that no reader learns one token's draw."""

    def __init__(self, namespace: str) -> None:
        metrics = EnsembleMetrics(namespace)
        self._tokens = metrics.counter("privmix_tokens", "Tokens released.", "answered_by")
        self._free = metrics.counter("privmix_free_tokens", "Tokens without an alternative, at no charge.")
        self._rows = metrics.counter("privmix_rows", "Rows asked of the models, the public model's included.")
        self._live = metrics.gauge("privmix_live_sequences", "Sequences that wait for a token.")
        self._batch = metrics.histogram("privmix_batch_size", "Sequences that a step advanced.", SIZES)
        self._first = metrics.histogram(
            "privmix_time_to_first_token_seconds", "From submission to the first token.", SECONDS
        )
        self._token = metrics.histogram(
            "privmix_token_seconds", "From one token to the next, the longest of a step.", SECONDS
        )

    def live(self, sequences: int) -> None:
        """Records the number of sequences that wait for a token."""
        self._live.set(sequences)

    def step(self, sequences: int, rows: int) -> None:
        self._batch.observe(sequences)
        self._rows.inc(rows)

    def released(self, tokens: Sequence[Released], free: int) -> None:
        """Records the sampled tokens that a step released, and how many more at no charge.

        Of the times from one token to the next it records the longest.
        """
        for name, public in (("protocol", False), ("public", True)):
            if count := sum(token.public == public for token in tokens):
                self._tokens.inc(count, {"answered_by": name})
        for token in tokens:
            if token.first:
                self._first.observe(token.waited_s)
        if later := [token.waited_s for token in tokens if not token.first]:
            self._token.observe(max(later))
        if free:
            self._free.inc(free)
