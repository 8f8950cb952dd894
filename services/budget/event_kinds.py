"""Every kind of event that a ledger may hold.

A protocol's file defines its events and makes them known when it is imported; a ledger may be read where nothing has
imported that file, so all of them are here.
"""

from importlib import import_module
from pkgutil import iter_modules

from services import privacy
from services.privacy.events import from_json

for _module in iter_modules(privacy.__path__, f"{privacy.__name__}."):
    import_module(_module.name)

__all__ = ["from_json"]
