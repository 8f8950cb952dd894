"""Models of random weights, by the names that transformers gives their families."""

from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM


def random_model(kind: str, **described: Any) -> Any:
    """Returns a causal language model whose configuration has these fields. Its weights follow torch's seed."""
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **described))
