"""What SGLang calls when it loads plugins, in every process: group sglang.srt.plugins.

Three registrations make a backend: its factory, its name among the choices of the command line, and a handler among
DeepSeek's. The third imports the model's code, and waits until the backend is asked for. `register` refuses nothing: an
engine that doesn't use this backend mustn't notice it. `create` does, a setting that isn't known too.
"""

from __future__ import annotations

from typing import Any

from pagedmla.plugin.sglang.settings import BACKEND, ENGINES_OWN, cache_setting


def register() -> None:
    """Put the backend behind `--attention-backend pagedmla`, for targets and for drafts."""
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    if BACKEND not in choices.ATTENTION_BACKEND_CHOICES:
        choices.add_attention_backend_choices([BACKEND])
    if BACKEND not in choices.DRAFT_ATTENTION_BACKEND_CHOICES:
        choices.add_draft_attention_backend_choices([BACKEND])
    register_attention_backend(BACKEND)(create)
    if cache_setting() != ENGINES_OWN:
        from pagedmla.plugin.sglang.hooks import hook_pool

        hook_pool()


def create(runner: Any) -> Any:
    """The backend of a model runner. ImportError for a release that we don't know, ValueError for what isn't served."""
    import sglang

    from pagedmla.adapters.sglang import check_version

    check_version(sglang.__version__)  # before the imports below fail in a way that only we understand

    from pagedmla.plugin.sglang.backend import PagedMLAAttnBackend
    from pagedmla.plugin.sglang.handler import register_handler
    from pagedmla.plugin.sglang.hooks import hook_drafts

    register_handler()
    hook_drafts()
    return PagedMLAAttnBackend(runner)
