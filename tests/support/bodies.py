"""Random values for the bodies of requests."""

from typing import Any

from hypothesis import strategies as st

from privmix.requests.responses.schema import ResponsesRequest
from privmix.requests.schema import ChatRequest, CompletionRequest

MARK = "Wilhelmina"

BODIES = (CompletionRequest, ChatRequest, ResponsesRequest)
FIELDS = sorted({"unknown", *(name for body in BODIES for name in body.model_fields)})
TEXT = st.sampled_from(["", MARK, "privmix", "text", "user", "\n", "\ud800", "none", "a" * 200])
SCALARS = st.none() | st.booleans() | st.integers(-3, 600) | st.integers() | st.floats() | TEXT | st.text(max_size=5)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "name", "refusal", "type", "text"]), SCALARS, max_size=4)
ITEMS: list[dict[str, Any]] = [
    {"type": "function_call", "call_id": "a", "name": MARK, "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": MARK},
    {"role": "user", "content": MARK},
]
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
