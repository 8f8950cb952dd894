"""Imports torch when it is first used.

Importing torch takes some two seconds of a processor and 150 MB. Many processes of a service import the mathematics of
privacy, for costs and settings, and never touch a tensor: the driver, the fleet, the budget, the gateways. So a module
that such a process imports takes `torch` from here, and names `Tensor` for types alone. SciPy does the same itself:
`scipy.stats` is imported when it is first used.
"""

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
