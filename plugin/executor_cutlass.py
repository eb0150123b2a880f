"""The CUTLASS decode kernels, on Hopper: attention of decode rows. Prompts behind them and the rest are Triton's.

A step is one launch, and one to merge where its keys are cut. Each tile of query rows and each precision has a kernel
of its own (executor_cutlass_variants.py); a plan loads all that its steps may take when it is made, so that a step
captured in a graph loads nothing and takes no memory but the plan's.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from pagedmla.cutlass_kernels import launch
from pagedmla.cutlass_kernels.cubin_cache import (
    Cubin,
    CubinCache,
    CubinError,
    address_of,
    dsl_version,
    folders,
    source_digest,
)
from pagedmla.cutlass_kernels.driver import DriverError
from pagedmla.cutlass_kernels.launch_checks import NotTaken
from pagedmla.cutlass_kernels.tiles import LATENT
from pagedmla.cutlass_kernels.variants import COMBINES, CombineVariant, Variant
from pagedmla.kv_cache.checks import Refusal, quoted, refuse
from pagedmla.plugin import executor_cutlass_variants as variants
from pagedmla.plugin.executor_triton import PartialStates, TritonExecutor, attend_from, multiprocessors
from pagedmla.plugin.executors import AttendOptions, Capacity, Configuration, Executor
from pagedmla.plugin.proven import Record, record_of, records
from pagedmla.plugin.step import Step

HOPPER = (9, 0)
_ALLOW_UNPROVEN = "PAGEDMLA_ALLOW_UNPROVEN"
_NO_DEVICE = "there is no CUDA device here"


@dataclass(frozen=True, eq=False)
class Pieces(PartialStates):
    """Room for the pieces of cut rows, and for Triton's; `cuts [rows]` int32: how each row was cut."""

    cuts: Tensor

    @classmethod
    def empty(cls, partial_rows: int, rows: int, latent: int, device: torch.device) -> Pieces:
        return cls(
            torch.empty(partial_rows, dtype=torch.float32, device=device),
            torch.empty(partial_rows, latent, dtype=torch.float32, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return *super().tensors(), self.cuts

    @cached_property
    def workspace(self) -> launch.Workspace:
        return launch.Workspace(self.partial_out, self.partial_lse, self.cuts)


class CutlassExecutor(TritonExecutor):
    name = "cutlass"
    summary = "CUTLASS kernels for Hopper's FP8 tensor cores"
    only_launches = False  # its launcher has a path of its own

    def serving(self, operation: str) -> Executor:
        return self if operation == "attend" else TritonExecutor()

    def refusal(self, configuration: Configuration) -> str | None:
        """Only what is known without a step: strides, places and the dtype of scales are the launcher's to check."""
        device = configuration.device
        if device.type != "cuda":
            return f"it runs on Hopper GPUs, not on {device.type}"
        return (
            variants.refusal(configuration)
            or super().refusal(configuration)  # of prompts
            or _device_refusal(device)
            or _cubins_refusal(configuration)
        )

    def drawback(self, configuration: Configuration) -> str | None:
        setting = os.environ.get(_ALLOW_UNPROVEN, "")
        if setting not in ("", "0", "1"):
            refuse(_ALLOW_UNPROVEN, "0 or 1", quoted(setting))
        if setting == "1":
            return None
        unproven = [each.name for each in _needed(configuration) if proof(each) is None]
        if not unproven:
            return None
        names = unproven[0] + (f" and {len(unproven) - 1} more" if len(unproven) > 1 else "")
        return f"unproven on a GPU: {names} (executor='cutlass' or {_ALLOW_UNPROVEN}=1 takes it all the same)"

    def load(self, configuration: Configuration, capacity: Capacity) -> str | None:
        """Its own kernels are proven by hash, Triton's of prompts by a run."""
        if not torch.cuda.is_available():
            return _NO_DEVICE
        try:
            for variant in variants.choices(configuration, capacity):
                launch.launcher(variant, configuration.device)
        except (CubinError, DriverError, ImportError) as reason:
            return str(reason)
        return super().load(configuration, capacity)

    def kernels(self, configuration: Configuration, capacity: Capacity) -> tuple[str, ...]:
        used = variants.uses(configuration, capacity)
        return tuple(f"{use}: {use.variant.name} ({_proof_in_words(use.variant)})" for use in used)

    def partitions(self, configuration: Configuration, capacity: Capacity, requests: int, tokens: int) -> int:
        return variants.pieces(configuration, capacity, requests, tokens, multiprocessors(configuration.device))

    def workspace(self, configuration: Configuration, capacity: Capacity, num_partitions: int) -> Pieces:
        """For every step: two tiles of rows a multiprocessor, and as many as Triton wants for prompts."""
        rows = capacity.max_tokens * (configuration.num_heads or 0)
        partial_rows = 0
        if num_partitions > 1:
            ctas = multiprocessors(configuration.device)
            own = max(launch.partial_rows(variant, ctas) for variant in variants.choices(configuration, capacity))
            partial_rows = max(own, self.partial_rows(configuration, capacity, num_partitions))
        return Pieces.empty(partial_rows, rows, LATENT, configuration.device)

    def schedule(self, step: Step, q: Tensor, options: AttendOptions) -> None:
        """Its kernels make their own."""

    def attend(self, step: Step, q: Tensor, out: Tensor, lse: Tensor, options: AttendOptions) -> None:
        requests, tokens = step.decode_rows
        if tokens == 0:
            super().attend(step, q, out, lse, options)
            return
        whole = requests == step.batch  # then padding behind the last request is the kernel's too
        rows = (q, out, lse) if whole else (q[:tokens], out[:tokens], lse[:tokens])
        variant = variants.variant_of_step(step, q, options, requests, tokens)
        try:
            launch_decode(launch.launcher(variant, q.device), variant, step, *rows, options, requests)
        except NotTaken as reason:  # nothing was launched
            if options.asked_for:
                raise
            _tell_once(variant.name, str(reason))
            super().attend(step, q, out, lse, options)
            return
        if not whole:
            attend_from(step, q, out, lse, options, requests)


def launch_decode(
    kernel: Callable[..., None],
    variant: Variant,
    step: Step,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    options: AttendOptions,
    requests: int,
) -> None:
    """Call a variant's launcher for the step's first requests, whose tokens are the rows of `q`."""
    cache, starts = step.cache, step.query_start_loc
    tables, lengths = (cache.lookup_table, cache.scales_lookup_table), cache.cache_lengths
    if requests < step.batch:
        tables, lengths = (tables[0][:requests], tables[1][:requests]), lengths[:requests]
        starts = starts[: requests + 1]
    partitions, room = options.num_partitions, options.workspace
    partial_rows = launch.partial_rows(variant, multiprocessors(q.device)) if partitions > 1 else 0
    if not isinstance(room, Pieces):  # without a plan: memory of its own
        room = Pieces.empty(partial_rows, q.shape[0] * q.shape[1], out.shape[2], q.device)
    if partial_rows > room.workspace.partial_rows:
        partitions = 1  # a plan has the room; without it, a step is whole
    kernel(
        q,
        step.planes,
        tables[0],
        lengths,
        starts,
        out,
        lse,
        room.workspace,
        sm_scale=options.sm_scale,
        causal=options.causal,
        num_partitions=partitions,
        scales_lookup_table=tables[1],
    )


def proof(kernel: Variant | CombineVariant) -> Record | None:
    """The record of a kernel's cubin; of the one that would be built, where there is none yet.

    A damaged file of records proves nothing, and a warning names it: "auto" goes on to Triton.
    """
    try:
        return _proof(kernel)
    except Refusal as damage:
        warnings.warn(str(damage), RuntimeWarning, stacklevel=2)
        return None


def _proof(kernel: Variant | CombineVariant) -> Record | None:
    try:
        return record_of(_cubin(kernel.name, tuple(folders())))
    except CubinError:
        dsl = dsl_version()
        return records().get(address_of(kernel.name, source_digest(), dsl)) if dsl else None


def _proof_in_words(kernel: Variant | CombineVariant) -> str:
    record = proof(kernel)
    return "unproven on a GPU" if record is None else f"proven on {record.card}, {record.date}"


def _needed(configuration: Configuration) -> tuple[Variant | CombineVariant, ...]:
    """All kernels that steps of a configuration may launch."""
    chosen = variants.choices(configuration)
    dtypes = {variant.dtype for variant in chosen}
    return (*chosen, *(each for each in COMBINES if each.dtype in dtypes))


def _cubins_refusal(configuration: Configuration) -> str | None:
    if dsl_version() is not None:
        return None  # built on demand
    try:
        for kernel in _needed(configuration):
            _cubin(kernel.name, tuple(folders()))
    except CubinError as missing:
        return str(missing)
    return None


@lru_cache(maxsize=256)
def _cubin(name: str, where: tuple[Path, ...]) -> Cubin:
    """What is known of a variant's cubin, without its image. CubinError, which isn't kept, where there is none."""
    return replace(CubinCache(where).get(name), image=b"")


def _device_refusal(device: torch.device) -> str | None:
    """Of a GPU that is here. One that isn't is taken for an H200, as a plan without memory asks; `load` refuses one
    with memory."""
    if not torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        return _NO_DEVICE
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) != HOPPER:
        name = torch.cuda.get_device_name(device)
        return f"it is built for compute capability 9.0 (Hopper), and {name} has {major}.{minor}"
    if not _has_bindings():
        return "cuda-python isn't installed: pip install pagedmla[cutlass]"
    return None


@lru_cache(maxsize=1)
def _has_bindings() -> bool:
    return find_spec("cuda") is not None and find_spec("cuda.bindings") is not None


_told: set[tuple[str, str]] = set()


def _tell_once(kernel: str, reason: str) -> None:
    """A warning for each kernel and tensor: addresses differ from layer to layer."""
    key = (kernel, reason.split(":")[0])
    if key not in _told:
        _told.add(key)
        message = f"cutlass: Triton serves steps that {kernel} doesn't take. {reason}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
