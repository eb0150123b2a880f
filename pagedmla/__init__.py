"""FP8 paged multi-head latent attention (MLA) for vLLM-style engines: the public API and nothing else.

The names are those of `pagedmla.public`. They load, and torch with them, when the first is asked for: neither
`pagedmla --help` nor an engine that looks for plugins waits for that.
"""

import os as _os
from importlib import import_module as _import_module

# What type checkers take for true, without `typing`; and no pathlib: the command waits for this module before it can
# answer Ctrl-C.
TYPE_CHECKING = False

__version__ = "0.1.0"

# In a clone the subpackages are the folders beside this one; in a wheel they lie inside it.
_here = _os.path.dirname(_os.path.abspath(__file__))
if not _os.path.isdir(_os.path.join(_here, "kv_cache")):
    __path__.append(_os.path.dirname(_here))

if TYPE_CHECKING:
    from pagedmla.public import *  # noqa: F403
    from pagedmla.public import __all__ as __all__
else:
    del TYPE_CHECKING

    def __getattr__(name: str) -> object:
        if name == "__all__" or not name.startswith("__"):
            public = _import_module("pagedmla.public")  # with the subpackages, which are attributes from then on
            if name == "__all__" or name in public.__all__:
                globals()[name] = getattr(public, name)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'pagedmla' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *_import_module("pagedmla.public").__all__})
