"""Claim: logits are in float32 where the machine makes them so at no cost."""

import pytest

from privmix.engine.vllm_engine import _head_dtype


@pytest.mark.parametrize(
    ("on_cpu", "batch_invariant", "expected"), [(True, "0", "model"), (False, "0", "float32"), (False, "1", "model")]
)
def test_logits_are_in_float32_where_it_costs_nothing(
    on_cpu: bool, batch_invariant: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", batch_invariant)
    assert _head_dtype(on_cpu) == expected
