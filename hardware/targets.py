"""GPUs that kernels are built for, and how many thread blocks of a given size one of their multiprocessors holds.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (registers are handed out per
warp in units of 256, to four partitions; one KiB of shared memory a block is the system's); AMD CDNA3 and CDNA4 ISA
guides and LLVM's AMDGPU target (512 registers a lane and SIMD in units of 8, at most 8 waves a SIMD, 4 SIMDs a unit).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch

from pagedmla.kv_cache.checks import Refusal


@dataclass(frozen=True)
class Target:
    """One GPU architecture. Sizes in bytes and registers in 32-bit words; "unit" is an SM or a compute unit."""

    name: str
    backend: str  # Triton's name: "cuda" or "hip"
    arch: int | str
    warp_size: int
    shared_per_block: int
    shared_per_unit: int
    shared_reserved: int  # taken from every block by the system
    registers_per_partition: int
    register_granule: int  # words handed out at a time, per warp
    warps_per_partition: int
    partitions: int
    blocks_per_unit: int
    native_e4m3: bool  # reads e4m3 by an instruction; elsewhere bits are shifted into place
    rounds_e4m3: bool  # rounds float32 to e4m3 once, saturating, by an instruction; elsewhere integers do it
    # What Triton's builds for it are good at, by what they came to (docs/kernels/decode_triton.md).
    warpgroup_mma: bool  # an MMA of four warps, which reads its operands from shared memory
    tiles_of_32: bool  # a tile of 32 rows is built right and worth it
    second_stage: bool  # two stages of 64 unquantised keys fit its shared memory beside 16 rows
    hoists_float32: bool  # a loop over float32 keys keeps its invariants in registers; elsewhere it spills thousands

    def blocks_resident(self, registers: int, warps: int, shared: int) -> int:
        """Blocks of `warps` warps with `registers` a thread and `shared` bytes that one unit holds; 0: it fits none."""
        if shared > self.shared_per_block:
            return 0
        granules = max(1, -(-registers * self.warp_size // self.register_granule))
        by_registers = self.registers_per_partition // (granules * self.register_granule)
        warps_held = min(by_registers, self.warps_per_partition) * self.partitions
        by_shared = self.shared_per_unit // max(1, shared + self.shared_reserved)
        return min(warps_held // warps, by_shared, self.blocks_per_unit)


def _nvidia(arch: int, shared_per_unit: int, warps_per_partition: int, blocks_per_unit: int) -> Target:
    return Target(
        name=f"sm_{arch}",
        backend="cuda",
        arch=arch,
        warp_size=32,
        shared_per_block=shared_per_unit - 1024,
        shared_per_unit=shared_per_unit,
        shared_reserved=1024,
        registers_per_partition=16384,
        register_granule=256,
        warps_per_partition=warps_per_partition,
        partitions=4,
        blocks_per_unit=blocks_per_unit,
        native_e4m3=arch >= 89,
        rounds_e4m3=arch >= 90,
        warpgroup_mma=90 <= arch < 120,  # from 120 on there is the MMA of one warp alone
        tiles_of_32=arch // 10 != 9,  # ptxas 12.8 gets them wrong with Hopper's warpgroup MMA
        second_stage=arch // 10 == 9,  # Blackwell's build needs a little more than it has
        hoists_float32=arch >= 89,
    )


def _amd(arch: str, shared: int, native_e4m3: bool) -> Target:
    return Target(
        name=arch,
        backend="hip",
        arch=arch,
        warp_size=64,
        shared_per_block=shared,
        shared_per_unit=shared,
        shared_reserved=0,
        registers_per_partition=512 * 64,
        register_granule=8 * 64,
        warps_per_partition=8,
        partitions=4,
        blocks_per_unit=16,
        native_e4m3=native_e4m3,
        rounds_e4m3=False,
        warpgroup_mma=False,
        tiles_of_32=False,  # beyond 16 rows they spill hundreds of words
        second_stage=False,
        hoists_float32=True,
    )


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia(80, 164 * 1024, 16, 32),
        _nvidia(89, 100 * 1024, 12, 24),
        _nvidia(90, 228 * 1024, 16, 32),
        _nvidia(100, 228 * 1024, 16, 32),
        _amd("gfx942", 64 * 1024, native_e4m3=False),  # its FP8 is another format
        _amd("gfx950", 160 * 1024, native_e4m3=True),
    )
}


def find_target(name: str) -> Target:
    """The target of that name (`sm_90a` means `sm_90`). ValueError names those there are."""
    known = TARGETS.get(name.removesuffix("a") if name.startswith("sm_") else name)
    if known is None:
        raise Refusal(f"target: expected one of {', '.join(TARGETS)}; got {name!r}")
    return known


_assumed: ContextVar[Target | None] = ContextVar("assumed", default=None)


@contextmanager
def assumed_target(target: Target) -> Iterator[None]:
    """Have `target_of` say `target` in this thread: host code then chooses what it would choose on that GPU."""
    token = _assumed.set(target)
    try:
        yield
    finally:
        _assumed.reset(token)


def target_of(device: torch.device) -> Target:
    """The target that a device is. One that isn't listed has its nearest relative's sizes but for shared memory, and
    can what its architecture can.

    Without a GPU, sm_90: the interpreter has no limits of its own.
    """
    assumed = _assumed.get()
    if assumed is not None:
        return assumed
    if device.type != "cuda":
        return TARGETS["sm_90"]
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
        return TARGETS.get(name) or replace(
            TARGETS["gfx942"], name=name, arch=name, shared_per_block=properties.shared_memory_per_block
        )
    arch = 10 * properties.major + properties.minor
    if f"sm_{arch}" in TARGETS:
        return TARGETS[f"sm_{arch}"]
    relative = TARGETS[f"sm_{max((known for known in (80, 89, 90, 100) if known <= arch), default=80)}"]
    shared: int = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    target = _nvidia(arch, relative.shared_per_unit, relative.warps_per_partition, relative.blocks_per_unit)
    return replace(target, shared_per_block=shared)
