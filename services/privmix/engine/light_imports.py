"""Starts an engine on a CPU, by vLLM or transformers, in less of the time, by what it imports: vLLM in some half of it.

vLLM and transformers import what any of their servers may need. An engine never resamples audio, renders prompts,
parses answers or measures predictions, and compiles nothing on a CPU. So while an engine is imported, and while vLLM
starts,

- `torch.compile` leaves functions as they are, and modules are missing of which vLLM expects that they may be;
- transformers finds neither scikit-learn, which brings pandas, nor SciPy;
- a class stands for each of some that vLLM only names in a signature, asks for a type, or makes and never calls, whose
  modules bring OpenAI's types and kinds of weights.

Afterwards others can import all of these. Reviewed against vLLM 0.32.0 and transformers 5.17.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, ModuleType
from typing import Any

from privmix.foundation.lazily import quick_imports

MISSING: Sequence[str] = ("scipy.signal", "torch._inductor.lowering")
"""The modules that `vllm.multimodal.audio` and `vllm.env_override` do without."""
NAMED: Mapping[str, str] = {
    "vllm.entrypoints.mcp.tool_server": "ToolServer",
    "vllm.parser.engine.adapters": "ParserEngineReasoningAdapter",
}
"""Modules of vLLM, and the class that others import from them."""
UNUSED: Sequence[str] = ("is_scipy_available", "is_sklearn_available")
"""The functions by which transformers asks for what it uses in losses, and in drafts of a second model."""


def stand_in(name: str, **members: type) -> ModuleType:
    """Returns a module with these classes, which stands for that of its name while an engine starts."""
    module = ModuleType(name, stand_in.__doc__)
    vars(module).update(members)
    return module


@contextmanager
def light_imports(more: Mapping[str, ModuleType] = MappingProxyType({})) -> Iterator[None]:
    """Leaves out, until the block ends, what an engine on a CPU never uses; nothing where PyTorch is built for GPUs.

    Args:
        more: modules that stand for others, by name.
    """
    with quick_imports({}):
        import torch

        if torch.version.cuda is not None:
            yield
            return
        from transformers import utils
        from transformers.utils import import_utils

        answers = dict.fromkeys(UNUSED, lambda: False)
        modules: dict[str, Any] = {**dict.fromkeys(MISSING), **more}
        modules |= {name: stand_in(name, **{member: type(member, (), {})}) for name, member in NAMED.items()}
        with (
            quick_imports(modules),
            _put(os.environ, {"TORCHDYNAMO_DISABLE": "1"}),
            _put(vars(utils), answers),
            _put(vars(import_utils), answers),
        ):
            yield


@contextmanager
def _put(target: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Puts values into a mapping until the block ends."""
    before = {name: target[name] for name in values if name in target}
    target.update(values)
    try:
        yield
    finally:
        for name in values:
            del target[name]
        target.update(before)
