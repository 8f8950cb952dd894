"""Names the fields of OpenAI's and vLLM's requests that this service does not support, and why.

Each is accepted with null and its neutral values, which change nothing, and refused with any other value.
"""

from collections.abc import Mapping

_BY_REASON: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "answers are plain text only; remove it": {
        "annotations": ([],), "audio": (), "modalities": (["text"],), "refusal": ("",),
        "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    },
    "an answer ends at the model's end token, a stop string or max_tokens; remove it": {
        "include_stop_str_in_output": (False,), "min_tokens": (0,), "stop_token_ids": ([],), "verbosity": ("medium",),
    },
    "answers are sampled; search is not supported; remove it, or use n": {
        "best_of": (1,), "early_stopping": (False,), "use_beam_search": (False,),
    },
    "calls of tools are not supported; remove it, and ask for JSON with response_format": {
        "function_call": ("none",), "functions": ([],), "tool_call_id": (), "tool_calls": ([],),
        "tool_choice": ("none", "auto"), "tools": ([],),
    },
    "penalties for repeated tokens are not supported; remove it": {
        "frequency_penalty": (0,), "length_penalty": (1,), "no_repeat_ngram_size": (0,), "presence_penalty": (0,),
        "repetition_penalty": (1,),
    },
    "probabilities of the private models never leave the service; remove it": {
        "logprobs": (False,), "prompt_logprobs": (0,), "top_logprobs": (0,),
    },
    "requests and answers are not stored; remove it": {
        "metadata": ({},), "prompt_cache_options": ({},), "prompt_cache_retention": (), "store": (False,),
    },
    "sampling supports only temperature, top_p and top_k; remove it": {
        "allowed_token_ids": (), "bad_words": ([],), "logit_bias": ({},), "min_p": (0,), "typical_p": (1,),
    },
    "special tokens are always added to a prompt and never written in an answer; use true": {
        "add_special_tokens": (True,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    },
    "the model's own chat template is used; remove it": {
        "add_generation_prompt": (True,), "chat_template": (), "chat_template_kwargs": ({},),
    },
    "chunks are not padded; use false": {"include_obfuscation": (False,)},
    "insertion before a suffix is not supported; remove it": {"suffix": ("",)},
    "moderation is not supported; remove it": {"moderation": ()},
    "names of participants are not supported; remove it": {"name": ("",)},
    "predicted outputs are not supported; remove it": {"prediction": ()},
    "prompts are not truncated or changed; remove it": {"truncate_prompt_tokens": (-1,)},
    "separate reasoning is not supported; remove it": {"reasoning_effort": ("none",)},
    "the requests of a key start in order; remove it": {"priority": (0,)},
    "there is only one service tier; remove it": {"service_tier": ("auto", "default")},
    "web search is not supported; remove it": {"web_search_options": ()},
}  # fmt: skip
_GUIDED = "vLLM replaced this field; use structured_outputs with json, regex, choice or json_object"
REASONS = {name: reason for reason, fields in _BY_REASON.items() for name in fields}


def reason(name: str) -> str | None:
    """Returns why a field is not supported; None if this module does not name it."""
    return _GUIDED if name.startswith("guided_") else REASONS.get(name)


def has_effect(name: str, value: object) -> bool:
    """Tells whether the value of a field that a request does not have asks for something.

    Null never does. A field that this module does not name asks for nothing if it is false or empty.
    """
    if name.startswith("guided_"):
        neutral: tuple[object, ...] = (False, "")
    elif name in REASONS:
        neutral = _BY_REASON[REASONS[name]][name]
    else:
        neutral = (False, "", [], {})
    return value is not None and not any(_same(value, other) for other in neutral)


def _same(value: object, neutral: object) -> bool:
    """Compares JSON values: an integer equals its float, but a boolean equals no number."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
