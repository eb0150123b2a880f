"""The protocol's rings as barriers in shared memory: what the roles of the kernel call, held to the table."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute

from pagedmla.cutlass_kernels.protocol import BARRIER_BYTES, Action, Following, Protocol
from pagedmla.cutlass_kernels.traced import Traced


class Barriers(Traced):
    """Barriers of a CTA. `fill` counts a ring's fills since the kernel began (Int32)."""

    def __init__(self, protocol: Protocol, base: Any) -> None:
        self.protocol = protocol
        self._base = cute.recast_ptr(base, dtype=cutlass.Int64)
        self._following: Following | None = None

    def stage(self, ring: str, fill: Any) -> Any:
        """Where a fill of a ring lies."""
        return self.protocol.ring(ring).stage(fill)

    def full(self, ring: str, fill: Any) -> Any:
        return self._at(self.protocol.full_offset(ring, 0), ring, fill)

    def empty(self, ring: str, fill: Any) -> Any:
        return self._at(self.protocol.empty_offset(ring, 0), ring, fill)

    def _at(self, first: int, ring: str, fill: Any) -> Any:
        return self._base + first // BARRIER_BYTES + self.stage(ring, fill)

    def initialise(self) -> None:
        """By one thread of the CTA."""
        for ring in self.protocol.rings:
            for stage in range(ring.stages):
                cute.arch.mbarrier_init(self.full(ring.name, stage), ring.full)
                cute.arch.mbarrier_init(self.empty(ring.name, stage), ring.empty)

    # Each call is a step of the protocol; `block` is its block relative to the trip's (0, -1 or 2).

    def wait(self, ring: str, fill: Any, block: int = 0) -> None:
        self.step(Action.WAIT, ring, block)
        cute.arch.mbarrier_wait(self.full(ring, fill), self.protocol.ring(ring).wait_parity(fill))

    def acquire(self, ring: str, fill: Any) -> None:
        self.step(Action.ACQUIRE, ring)
        cute.arch.mbarrier_wait(self.empty(ring, fill), self.protocol.ring(ring).acquire_parity(fill))

    def commit(self, ring: str, fill: Any) -> None:
        """By one thread for its warp or for all, after those it speaks for have met."""
        self.step(Action.COMMIT, ring)
        cute.arch.mbarrier_arrive(self.full(ring, fill))

    def release(self, ring: str, fill: Any, block: int = 0) -> None:
        """As `commit`; in every CTA that fills the ring."""
        self.step(Action.RELEASE, ring, block)
        if self.protocol.ring(ring).multicast:
            for peer in range(self.protocol.cluster):
                cute.arch.mbarrier_arrive(self.empty(ring, fill), peer)
        else:
            cute.arch.mbarrier_arrive(self.empty(ring, fill))

    def step(self, action: Action, ring: str, block: int = 0) -> None:
        """Hold the step that is being traced to the table."""
        if self._following is not None:
            self._following.step(action, ring, block)

    def begin(self, role: str, section: str, blocks: tuple[int, ...] | None = None) -> None:
        """What is traced until `end` is this section of a role's steps, in the table's order (Protocol.following)."""
        self._following = self.protocol.following(role, section, blocks)

    def end(self) -> None:
        if self._following is not None:
            self._following.end()
        self._following = None
