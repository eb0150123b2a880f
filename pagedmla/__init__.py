"""FP8 paged multi-head latent attention (MLA) for vLLM-style engines: the public API and nothing else.

The names are those of `pagedmla.public`. They load, and torch with them, when the first is asked for: neither
`pagedmla --help` nor an engine that looks for plugins waits for that.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# In a clone the subpackages are the folders beside this one; in a wheel they lie inside it.
if not (Path(__file__).parent / "kv_cache").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from pagedmla.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name == "__all__" or not name.startswith("__"):
            public = import_module("pagedmla.public")  # with the subpackages, which are attributes from then on
            if name == "__all__" or name in public.__all__:
                globals()[name] = getattr(public, name)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'pagedmla' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *import_module("pagedmla.public").__all__})
