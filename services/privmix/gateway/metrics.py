"""Defines the metrics of the gateways. Prometheus gets them from Ray."""

from ray.util.metrics import Counter

requests = Counter("privmix_requests", "Requests for a generation, refused ones included.", ())
refusals = Counter("privmix_refusals", "Requests that were refused, by the code of OpenAI's error shape.", ("reason",))
