"""A plan's Triton kernels on the GPU that it is for, against torch on the host, before they serve anything.

What is compiled at a user's differs from what was tested: another assembler, GPU or Triton. Assemblers have been wrong
(docs/kernels/decode_triton.md, "ptxas 12.8"), in ways that leave LSE right and outputs not. So a plan runs stores and
causal attention on a small cache and is refused where they are wrong. It doesn't check the dense path of long prompts,
non-causal calls, or builds for other strides, one scale a tensor, or more than 255 requests. PAGEDMLA_SELF_CHECK=0
leaves it out.
"""

from __future__ import annotations

import os
from dataclasses import replace

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import ceildiv, quoted, refuse
from pagedmla.kv_cache.page_pool import PagePool
from pagedmla.kv_cache.paged_tensor import raw_view
from pagedmla.kv_cache.splits import SMALLEST_PIECE
from pagedmla.plugin.executors import AttendOptions, Capacity, Configuration, Executor
from pagedmla.plugin.step import Step, bind_step

SWITCH = "PAGEDMLA_SELF_CHECK"
_OUT, _LSE = 2e-2, 1e-2  # relative to the largest, and absolute: far above any rounding, far below any fault
_CACHED = (400, 60)  # tokens of two requests: one that is cut, one that isn't
_PROMPTS = (40, 3)  # tokens more: several tiles of rows and a few
_SM_SCALE = 0.1


def is_wanted() -> bool:
    setting = os.environ.get(SWITCH, "").strip()
    if setting not in ("", "0", "1"):
        refuse(SWITCH, "0 or 1", quoted(setting))
    return setting != "0"


def parts(executor: Executor, configuration: Configuration, capacity: Capacity) -> int:
    """Parts that the check cuts its requests into: a plan's, as far as they have keys for it."""
    wanted = executor.partitions(configuration, capacity, len(_CACHED), len(_CACHED))
    return max(2, min(wanted, ceildiv(max(_CACHED) + max(_PROMPTS), SMALLEST_PIECE)))


def fault(executor: Executor, configuration: Configuration, cut: int) -> str | None:
    """What of `executor` is wrong on the configuration's device, in words; None where nothing is.

    Stores, by tables and by slots, and attention of single query tokens and of several, whole and in `cut` pieces, are
    compared with the torch executor's on the host.
    """
    host = replace(configuration, device=torch.device("cpu"))
    theirs = _stored(_host_executor(), host)
    for by_slots in (True, False):
        mine = _stored(executor, configuration, by_slots)
        for name in ("blocks", "scales"):
            pools = getattr(mine, name), getattr(theirs, name)
            if pools[0] is not None and not torch.equal(raw_view(pools[0]).cpu(), raw_view(pools[1])):
                how = "slots" if by_slots else "tables"
                return f"Triton's store by {how} writes other bytes to {name} than torch does ({_where(configuration)})"
    for what, q_lens, partitions in (
        ("decode", (1, 1), 1),
        ("decode in pieces", (1, 1), cut),
        ("prompts", _PROMPTS, 1),
        ("prompts in pieces", _PROMPTS, cut),
    ):
        q = torch.randn(sum(q_lens), configuration.num_heads or 1, mine.layout.width, generator=_generator(3))
        q = q.to(configuration.dtype or torch.bfloat16)
        got = _attended(executor, mine, q, q_lens, partitions)
        want = _attended(_host_executor(), theirs, q.float(), q_lens, 1)
        off = [(a.float().cpu() - b).abs().max().item() for a, b in zip(got, want)]
        off[0] /= want[0].abs().max().item()
        if not (off[0] <= _OUT and off[1] <= _LSE):  # NaN isn't
            return (
                f"Triton's {what} kernel is wrong ({_where(configuration)}): "
                f"out is off by {off[0]:.1e} of the largest, lse by {off[1]:.1e}"
            )
    return None


def _host_executor() -> Executor:
    from pagedmla.plugin.executor_torch import TorchExecutor

    return TorchExecutor()


def _stored(executor: Executor, configuration: Configuration, by_slots: bool = False) -> PagePool:
    """A cache of two requests, stored by `executor` on the configuration's device."""
    layout, page_size = configuration.layout, configuration.page_size or 64
    assert layout is not None
    tokens = [sum(each) for each in zip(_CACHED, _PROMPTS)]
    pages = sum(ceildiv(each, page_size) for each in tokens)
    pool = PagePool(
        layout, num_layers=1, page_size=page_size, num_pages=pages, shuffle_seed=1, device=configuration.device
    )
    names = list(range(len(tokens)))
    for name in names:
        pool.allocate(name)
    made = pool.values(names, tokens)
    wide = torch.float32 if configuration.dtype == torch.float32 else torch.bfloat16
    latent, rope = (
        torch.randn(sum(tokens), columns, generator=_generator(seed)).to(wide).to(configuration.device)
        for seed, columns in ((1, layout.latent), (2, layout.rope))
    )
    step = bind_step(made.values, 0, layout, made.query_start_loc, latent, "latent", check=False)
    if by_slots:
        slots = torch.tensor(
            [
                pool.pages(name)[token // page_size].value * page_size + token % page_size
                for name, count in zip(names, tokens)
                for token in range(count)
            ]
        ).to(configuration.device)
        executor.store_slots(step, latent, rope, slots, slots, power_of_two=False)
    else:
        executor.store(step, latent, rope, power_of_two=False)
    pool.advance(names, list(_CACHED))
    return pool


def _attended(
    executor: Executor, pool: PagePool, q: Tensor, q_lens: tuple[int, ...], partitions: int
) -> tuple[Tensor, Tensor]:
    made = pool.values(list(range(len(q_lens))), list(q_lens))
    q = q.to(pool.blocks.device)
    starts = None if set(q_lens) == {1} else made.query_start_loc
    step: Step = bind_step(made.values, 0, pool.layout, starts, q, "q", check=False)
    out, lse = q.new_empty(*q.shape[:2], pool.layout.latent), q.new_empty(q.shape[:2], dtype=torch.float32)
    executor.attend(step, q, out, lse, AttendOptions(_SM_SCALE, True, partitions, None))
    return out, lse


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _where(configuration: Configuration) -> str:
    import triton

    device = configuration.device
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return f"{configuration.layout}, {configuration.num_heads} heads, on {card} with Triton {triton.__version__}"
