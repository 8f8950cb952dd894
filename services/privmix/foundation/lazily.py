"""Imports torch when it is first used, and other large packages without what they bring and nobody uses.

Importing torch takes some two seconds of a processor and 150 MB. Many processes of a service import the mathematics of
privacy, for costs and settings, and never touch a tensor: the driver, the fleet, the budget, the gateways. So a module
that such a process imports takes `torch` from here, and names `Tensor` for types alone. SciPy does the same itself:
`scipy.stats` is imported when it is first used.
"""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any


class LazyModule:
    """Stands for a module and imports it when an attribute is first read. Safe in several threads, as `import` is."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # what pickle and the like ask of any object
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)


if TYPE_CHECKING:
    import torch as torch
else:
    torch = LazyModule("torch")


@contextmanager
def quick_imports(modules: Mapping[str, Any]) -> Iterator[None]:
    """Imports in the block find these modules in place of those of their names, unless these are imported already.

    None stands for a module that is missing, of which the importing package expects that it may be. The garbage
    collector rests meanwhile: it would look through the objects of thousands of modules again and again, for a fifth
    of the time of their import, and they live as long as the process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    absent = {name: module for name, module in modules.items() if name not in sys.modules}
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        if was_enabled:
            gc.enable()
