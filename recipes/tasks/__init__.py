"""Tasks: what can be learnt. Each is a folder whose `__init__.py` states its facts without importing torch."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
