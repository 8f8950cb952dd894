"""Imports vLLM for an engine on a CPU in some half of the time, which is most of the start of a shard.

vLLM and transformers import what any of their servers may need. An engine never resamples audio, parses answers or
measures predictions, and compiles nothing on a CPU. So while it is imported

- `torch.compile` leaves functions as they are, and modules are missing of which vLLM expects that they may be;
- transformers finds neither scikit-learn, which brings pandas, nor SciPy;
- a class stands for each of two that vLLM only names in a signature or asks for a type, and that bring OpenAI's types;
- the garbage collector rests: the objects of some thousand modules live as long as the process.

Afterwards others can import all of these. Reviewed against vLLM 0.32.0 and transformers 5.17.
"""

import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

MISSING: Sequence[str] = ("scipy.signal", "torch._inductor.lowering")
"""The modules that `vllm.multimodal.audio` and `vllm.env_override` do without."""
NAMED: Mapping[str, str] = {
    "vllm.entrypoints.mcp.tool_server": "ToolServer",
    "vllm.parser.engine.adapters": "ParserEngineReasoningAdapter",
}
"""Modules of vLLM, and the class that others import from them."""
UNUSED: Sequence[str] = ("is_scipy_available", "is_sklearn_available")
"""The functions by which transformers asks for what it uses in losses, and in drafts of a second model."""


@contextmanager
def light_imports() -> Iterator[None]:
    """Leaves out, until the block ends, what an engine on a CPU never uses; nothing where PyTorch is built for GPUs."""
    with ExitStack() as stack:
        stack.enter_context(_without_garbage_collector())
        import torch

        if torch.version.cuda is None:
            from transformers import utils
            from transformers.utils import import_utils

            modules: dict[str, Any] = dict.fromkeys(MISSING)  # None stands for a module that is missing
            modules |= {name: _module(name, member) for name, member in NAMED.items()}
            absent = {name: module for name, module in modules.items() if name not in sys.modules}
            stack.enter_context(_put(sys.modules, absent))
            stack.enter_context(_put(os.environ, {"TORCHDYNAMO_DISABLE": "1"}))
            for asked in (utils, import_utils):
                stack.enter_context(_put(vars(asked), dict.fromkeys(UNUSED, lambda: False)))
        yield


def _module(name: str, member: str) -> ModuleType:
    module = ModuleType(name, "Stands for a module of vLLM while an engine is imported.")
    setattr(module, member, type(member, (), {}))
    return module


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


@contextmanager
def _without_garbage_collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
