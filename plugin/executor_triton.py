"""The Triton kernels: on a GPU compiled, on a CPU run by the corrected interpreter, which is exact and slow.

Triton is imported when a kernel first runs. A step without splits is one launch. A split step is a launch for the parts
and one to merge them; where prompts stand behind the decode rows (`mixed_step_split`) and the step is too large to be
split whole, the prompts are a launch of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import ceildiv, dtype_name
from pagedmla.kv_cache.layouts import RowPlanes
from pagedmla.plugin.executors import AttendOptions, Capacity, Configuration, Executor, Workspace
from pagedmla.plugin.step import Step
from pagedmla.reference import vectorised

KEYS_A_PART = 128  # at least: a part costs a partial row written and read again
ROWS_A_BLOCK = 64  # at most


@dataclass(frozen=True)
class PartialStates(Workspace):
    """Room for so many rows (parts * tokens * heads): `partial_lse [rows]`, `partial_out [rows, latent]`."""

    partial_out: Tensor

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.partial_out.numel() * self.partial_out.element_size()

    def views(self, parts: int, tokens: int, heads: int) -> tuple[Tensor, Tensor]:
        """(out `[S, T, H, latent]`, lse `[S, T, H]`) at the front of the room."""
        rows = parts * tokens * heads
        shape = (parts, tokens, heads)
        return self.partial_out[:rows].view(*shape, -1), self.partial_lse[:rows].view(shape)


class TritonExecutor(Executor):
    name = "triton"
    summary = "Triton kernels"
    only_launches = True

    def refusal(self, configuration: Configuration) -> str | None:
        if find_spec("triton") is None:
            return "triton isn't installed: pip install pagedmla[triton]"
        if configuration.device.type not in ("cpu", "cuda"):
            return f"Triton kernels run on cuda and cpu devices, not on {configuration.device.type}"
        if configuration.dtype == torch.float64:
            return "the kernels compute in float32 at most, not in float64"
        layout = configuration.layout
        if layout is None:
            return None
        if layout.latent not in (256, 512) or layout.rope != 64:
            return f"the kernels take latents of 512 or 256 and a rope of 64, not {layout.latent} and {layout.rope}"
        if configuration.operation == "attend":
            return self._attend_refusal(configuration)
        return None

    def _attend_refusal(self, configuration: Configuration) -> str | None:
        layout, page_size = configuration.layout, configuration.page_size
        if layout is not None and layout.quantised and configuration.dtype == torch.float32:
            return f"queries over an FP8 cache are bfloat16 or float16, not {dtype_name(torch.float32)}"
        if page_size is not None and page_size & (page_size - 1) and page_size % 16:
            return f"page sizes are powers of two or multiples of 16, not {page_size}"
        if configuration.num_heads is not None and configuration.num_heads > 128:
            return f"the kernels take up to 128 heads, not {configuration.num_heads}"
        return None

    def drawback(self, configuration: Configuration) -> str | None:
        if configuration.device.type == "cuda":
            return None
        return "on a CPU it runs in Triton's interpreter, which is for tests"

    def partitions(self, configuration: Configuration, capacity: Capacity, requests: int, tokens: int) -> int:
        """As many parts as fill the multiprocessors once, none shorter than KEYS_A_PART keys (bench/results: H200).

        Requests of up to 32 rows take blocks of 16, of which an FP8 cache lets a multiprocessor hold two.
        """
        if requests == 0 or tokens == 0:
            return 1
        rows = ceildiv(tokens, requests) * (configuration.num_heads or 1)
        small = rows <= 32
        blocks = requests * ceildiv(rows, 16 if small else ROWS_A_BLOCK)
        held = 2 if small and configuration.layout is not None and configuration.layout.quantised else 1
        wanted = held * multiprocessors(configuration.device) // blocks
        return max(1, min(wanted, capacity.max_cache_length // KEYS_A_PART))

    def workspace(self, configuration: Configuration, capacity: Capacity, num_partitions: int) -> Workspace:
        """Rows for every split that `partitions` makes (its blocks, all full), or for the number given."""
        if num_partitions > 1:  # a step of another shape may take more parts than one of a single token
            num_partitions = max(num_partitions, capacity.max_cache_length // KEYS_A_PART)
        heads, latent = configuration.num_heads or 0, 0 if configuration.layout is None else configuration.layout.latent
        most = num_partitions * capacity.max_tokens * heads
        rows = min(most, multiprocessors(configuration.device) * ROWS_A_BLOCK) if num_partitions > 1 else 0
        device = configuration.device
        return PartialStates(
            torch.empty(rows, dtype=torch.float32, device=device),
            torch.empty(rows, latent, dtype=torch.float32, device=device),
        )

    def attend(self, step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions) -> None:
        planes = step.planes
        decode_requests, decode_tokens = step.decode_rows()
        if options.num_partitions == 1 or decode_tokens == 0:
            attend_requests(step, planes, q, out, lse, options, 0, step.batch, step.max_query_length())
        elif _fits(options, step.num_tokens, q.shape[1]):
            _attend_split(step, planes, q, out, lse, options, step.batch)
        elif decode_tokens < step.num_tokens and _fits(options, decode_tokens, q.shape[1]):
            decode = slice(0, decode_tokens)
            _attend_split(step, planes, q[decode], out[decode], lse[decode], options, decode_requests)
            attend_requests(step, planes, q, out, lse, options, decode_requests, step.batch, step.max_query_length())
        else:
            attend_requests(step, planes, q, out, lse, options, 0, step.batch, step.max_query_length())

    def store(self, step: Step, latent: Tensor, rope: Tensor, *, power_of_two: bool) -> Tensor | None:
        from pagedmla.triton_kernels.store import store

        store(
            latent,
            rope,
            step.planes,
            step.cache.lookup_table,
            step.cache.cache_lengths,
            step.query_start_loc,
            step.cache.scales_lookup_table,
            power_of_two=power_of_two,
        )
        return vectorised.dropped_from_step(step.cache, step.layout, step.query_start_loc) if step.on_host else None

    def store_slots(
        self, step: Step, latent: Tensor, rope: Tensor, slots: Tensor, scale_slots: Tensor, *, power_of_two: bool
    ) -> Tensor | None:
        from pagedmla.triton_kernels.store import store_slots

        store_slots(latent, rope, step.planes, slots, scale_slots, power_of_two=power_of_two)
        return vectorised.dropped_tokens(step.cache, step.layout, slots, scale_slots) if step.on_host else None

    def prefill(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        query_start_loc: Tensor,
        key_start_loc: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        sm_scale: float,
        causal: bool,
    ) -> None:
        from pagedmla.triton_kernels.prefill import prefill

        prefill(q, k, v, query_start_loc, key_start_loc, out, lse, sm_scale=sm_scale, causal=causal)

    def decompress(self, step: Step, starts: Tensor, key_start_loc: Tensor, out: Tensor) -> None:
        from pagedmla.triton_kernels.decompress import decompress

        tables = step.cache.lookup_table, step.cache.scales_lookup_table
        decompress(step.planes, tables[0], starts, key_start_loc, out, tables[1])

    def merge(self, outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
        from pagedmla.triton_kernels.merge import merge

        merge(outs, lses.to(torch.float32), out, lse)


def _fits(options: AttendOptions, tokens: int, heads: int) -> bool:
    """Whether the plan's workspace holds the parts of so many tokens; without a plan they get memory of their own."""
    workspace = options.workspace
    rows = options.num_partitions * tokens * heads
    return not isinstance(workspace, PartialStates) or rows <= workspace.partial_lse.shape[0]


def attend_requests(
    step: Step,
    planes: RowPlanes,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttendOptions,
    first: int,
    end: int,
    longest_query: int,
) -> None:
    """Requests first .. end - 1, whole (`out [T, H, latent]`) or in parts (`out [S, T, H, latent]`).

    `longest_query` chooses the tile of rows; any number is right.
    """
    cache = step.cache
    where = (planes, cache.lookup_table[first:end], cache.cache_lengths[first:end])
    scales_table = cache.scales_lookup_table[first:end]
    if step.one_token_each and first == 0:
        from pagedmla.triton_kernels.decode import attend_decode

        attend_decode(q, *where, out, lse, scales_table, sm_scale=options.sm_scale, causal=options.causal)
        return
    from pagedmla.triton_kernels.mixed import attend_mixed

    attend_mixed(
        q,
        *where,
        step.query_start_loc[first : end + 1],
        out,
        lse,
        scales_table,
        sm_scale=options.sm_scale,
        max_query_len=longest_query,
        causal=options.causal,
    )


def _attend_split(
    step: Step, planes: RowPlanes, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions, requests: int
) -> None:
    """The first `requests` requests, whose tokens are all of `q`: every part, then the merge."""
    from pagedmla.triton_kernels.merge import merge

    parts, (tokens, heads, _) = options.num_partitions, q.shape
    if isinstance(options.workspace, PartialStates):
        partial_out, partial_lse = options.workspace.views(parts, tokens, heads)
    else:
        partial_out = q.new_empty(parts, tokens, heads, out.shape[2], dtype=torch.float32)
        partial_lse = q.new_empty(parts, tokens, heads, dtype=torch.float32)
    # Decode rows are short and alike, whatever prompts stand behind them: their tile goes by their own mean.
    longest_query = ceildiv(tokens, requests) if requests < step.batch else step.max_query_length()
    attend_requests(step, planes, q, partial_out, partial_lse, options, 0, requests, longest_query)
    merge(partial_out, partial_lse, out, lse)


def multiprocessors(device: torch.device) -> int:
    """Of a GPU; an H200's where there is none."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count
