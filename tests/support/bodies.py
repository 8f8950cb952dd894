"""Random values for the bodies of requests."""

from hypothesis import strategies as st

from privmix.gateway.schema import ChatRequest, CompletionRequest
from privmix.gateway.unsupported import REASONS

MARK = "Wilhelmina"

BODIES = (CompletionRequest, ChatRequest)
FIELDS = sorted({"unknown", *REASONS, *(name for body in BODIES for name in body.model_fields)})
TEXT = st.sampled_from(["", MARK, "privmix", "text", "user", "\n", "\ud800", "none", "a" * 200])
SCALARS = st.none() | st.booleans() | st.integers(-3, 600) | st.integers() | st.floats() | TEXT | st.text(max_size=5)
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "name", "refusal", "type", "text"]), SCALARS, max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["type", "text", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
