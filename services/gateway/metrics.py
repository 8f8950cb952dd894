"""Exports the gateway's Prometheus metrics in addition to those of Ray Serve."""

from ray.util.metrics import Counter

refusals = Counter("privmix_refusals", "Requests that were refused, by the code of OpenAI's error shape.", ("reason",))
resumed = Counter(
    "privmix_generations_resumed", "Generations that were submitted again, as their coordinator was lost."
)
