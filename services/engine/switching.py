"""Which of a PEFT model's adapters answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftModel

from services.engine.engine import PUBLIC


@contextmanager
def using(model: Any, adapter: str) -> Iterator[None]:
    """Within, the model is the one of that adapter, or the base model for `PUBLIC`, whether it has adapters or not."""
    if adapter != PUBLIC:
        model.set_adapter(adapter)
        yield
    elif isinstance(model, PeftModel):
        with model.disable_adapter():
            yield
    else:
        yield
