"""GPUs that kernels are built for, and how many thread blocks of a given size one of their multiprocessors holds.

Sources: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (registers are handed out per
warp in units of 256, to four partitions; one KiB of shared memory a block is the system's); AMD CDNA3 and CDNA4 ISA
guides and LLVM's AMDGPU target (512 registers a lane and SIMD in units of 8, at most 8 waves a SIMD, 4 SIMDs a unit).
"""

from __future__ import annotations

from dataclasses import dataclass


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

    def blocks_resident(self, registers: int, warps: int, shared: int) -> int:
        """Blocks of `warps` warps with `registers` a thread and `shared` bytes that one unit holds; 0: it fits none."""
        if shared > self.shared_per_block:
            return 0
        per_warp = -(-registers * self.warp_size // self.register_granule) * self.register_granule
        warps_held = min(self.registers_per_partition // per_warp if per_warp else self.warps_per_partition,
                         self.warps_per_partition) * self.partitions
        by_shared = self.shared_per_unit // (shared + self.shared_reserved) if shared + self.shared_reserved else 1 << 30
        return min(warps_held // warps, by_shared, self.blocks_per_unit)


def _nvidia(arch: int, shared_per_unit: int, warps_per_partition: int, blocks_per_unit: int) -> Target:
    return Target(
        name=f"sm_{arch}", backend="cuda", arch=arch, warp_size=32,
        shared_per_block=shared_per_unit - 1024, shared_per_unit=shared_per_unit, shared_reserved=1024,
        registers_per_partition=16384, register_granule=256, warps_per_partition=warps_per_partition, partitions=4,
        blocks_per_unit=blocks_per_unit,
    )


def _amd(arch: str, shared: int) -> Target:
    return Target(
        name=arch, backend="hip", arch=arch, warp_size=64,
        shared_per_block=shared, shared_per_unit=shared, shared_reserved=0,
        registers_per_partition=512 * 64, register_granule=8 * 64, warps_per_partition=8, partitions=4,
        blocks_per_unit=16,
    )


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        _nvidia(80, 164 * 1024, 16, 32),
        _nvidia(89, 100 * 1024, 12, 24),
        _nvidia(90, 228 * 1024, 16, 32),
        _nvidia(100, 228 * 1024, 16, 32),
        _amd("gfx942", 64 * 1024),
        _amd("gfx950", 160 * 1024),
    )
}


def find_target(name: str) -> Target:
    """The target of that name (`sm_90a` means `sm_90`). ValueError names those there are."""
    known = TARGETS.get(name.removesuffix("a") if name.startswith("sm_") else name)
    if known is None:
        raise ValueError(f"target: expected one of {', '.join(TARGETS)}; got {name!r}")
    return known
