"""Registers the engines, which answer next-token queries with a base model and the parts of an ensemble.

A new engine is a file with a class that extends `engine.Engine`, and a line in `ENGINES`.
"""

from collections.abc import Mapping
from typing import Literal

ENGINES: Mapping[str, str] = {
    "vllm": "privmix.engine.vllm_engine:VllmEngine",
    "transformers": "privmix.engine.transformers_engine:TransformersEngine",
}
"""The class of each engine, by its name in the configuration. A class is imported only when an engine is created,
because its library is large and may be absent."""


VLLM_FAMILIES: Mapping[str, str] = {
    "llama": "LlamaModel",
    "mistral": "MistralModel",
    "qwen2": "Qwen2Model",
    "qwen3": "Qwen3Model",
    "qwen3_moe": "Qwen3MoeModel",
}
"""The types of models that vLLM runs with parts, as `config.json` names them, and vLLM's classes in files of these
names: their `forward` is a loop over layers like the readers' pass, with the same norm after it."""


PartKind = Literal["reader", "lora", "text"]
"""What a part is: an adapter that attends to the public model's keys and values (`reader_attention`), a plain LoRA
adapter with keys and values of its own, or a text that the public model reads first and that changes no weights
(`part_text`)."""


def known_engine(name: str) -> str:
    """Returns `name`. Raises ValueError if there is no engine of that name."""
    if name not in ENGINES:
        raise ValueError(f"must be one of {', '.join(ENGINES)}, not {name!r}")
    return name
