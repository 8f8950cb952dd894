"""Exports the coordinator's Prometheus metrics through Ray: counts and times only, no model output."""

from ray.util.metrics import Counter, Gauge, Histogram

from privmix.foundation.metrics import ENSEMBLE, of_ensemble

SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0]
SIZES = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]


class CoordinatorMetrics:
    """Records the metrics of a coordinator. Rows are a total, so that no reader learns one token's draw."""

    def __init__(self, namespace: str) -> None:
        self._tokens = of_ensemble(Counter("privmix_tokens", "Tokens released.", ("answered_by", ENSEMBLE)), namespace)
        self._free = of_ensemble(
            Counter("privmix_free_tokens", "Tokens without an alternative, at no charge.", (ENSEMBLE,)), namespace
        )
        self._rows = of_ensemble(
            Counter("privmix_rows", "Rows asked of the models, the public model's included.", (ENSEMBLE,)), namespace
        )
        self._live = of_ensemble(
            Gauge("privmix_live_sequences", "Sequences that wait for a token.", (ENSEMBLE,)), namespace
        )
        self._batch = of_ensemble(
            Histogram("privmix_batch_size", "Sequences that a step advanced.", SIZES, (ENSEMBLE,)), namespace
        )
        self._first = of_ensemble(
            Histogram(
                "privmix_time_to_first_token_seconds", "From submission to the first token.", SECONDS, (ENSEMBLE,)
            ),
            namespace,
        )
        self._token = of_ensemble(
            Histogram("privmix_token_seconds", "From one token to the next.", SECONDS, (ENSEMBLE,)), namespace
        )

    def free(self, tokens: int) -> None:
        """Records tokens that had no alternative and were released without a question to any model."""
        if tokens:
            self._free.inc(tokens)

    def live(self, sequences: int) -> None:
        """Records the number of sequences that wait for a token."""
        self._live.set(sequences)

    def step(self, sequences: int, rows: int) -> None:
        self._batch.observe(sequences)
        self._rows.inc(rows)

    def token(self, seconds: float, *, first: bool, public: bool) -> None:
        """Records one released token.

        Args:
            seconds: the time since the sequence's previous token, or since its submission if the token is the `first`.
            public: the public model alone answered.
        """
        self._tokens.inc(tags={"answered_by": "public" if public else "protocol"})
        (self._first if first else self._token).observe(seconds)
