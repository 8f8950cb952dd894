"""Selects the adapter of a PEFT model that runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel

from privmix.engine.engine import PUBLIC


@contextmanager
def using(model: Any, adapter: str) -> Iterator[None]:
    """Runs the block with this adapter active, or with none for `PUBLIC`. Accepts models without adapters too."""
    if adapter != PUBLIC:
        model.set_adapter(adapter)
        yield
    elif isinstance(model, PeftModel):
        with model.disable_adapter():
            yield
    else:
        yield
