"""The protocol's rings as barriers in shared memory: what the roles of the kernel call, held to the table."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import cutlass
import cutlass.cute as cute

from pagedmla.cutlass_kernels.protocol import Action, Protocol
from pagedmla.cutlass_kernels.traced import Traced

_BYTES = 8


class Barriers(Traced):
    """Barriers of a CTA. `fill` counts a ring's fills since the kernel began (Int32)."""

    def __init__(self, protocol: Protocol, base: Any) -> None:
        self.protocol = protocol
        self._base = cute.recast_ptr(base, dtype=cutlass.Int64)
        self._section: AbstractContextManager[Callable[..., Any]] | None = None
        self._follow: Callable[..., Any] | None = None

    def full(self, ring: str, fill: Any) -> Any:
        first = self.protocol.full_offset(ring, 0) // _BYTES
        return self._base + first + self.protocol.ring(ring).stage(fill)

    def empty(self, ring: str, fill: Any) -> Any:
        first = self.protocol.empty_offset(ring, 0) // _BYTES
        return self._base + first + self.protocol.ring(ring).stage(fill)

    def initialise(self) -> None:
        """By one thread of the CTA."""
        for ring in self.protocol.rings:
            for stage in range(ring.stages):
                cute.arch.mbarrier_init(self.full(ring.name, stage), ring.full)
                cute.arch.mbarrier_init(self.empty(ring.name, stage), ring.empty)

    # Each call is a step of the protocol; `block` is its block beside the trip's own (0, -1 or 2).

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
        """Hold the step that is being traced to the table (protocol.following)."""
        if self._follow is not None:
            self._follow(action, ring, block)

    def begin(self, role: str, section: str, blocks: tuple[int, ...] | None = None) -> None:
        """What is traced until `end` is this section of a role's steps, in the table's order; `blocks`: see there."""
        self._section = self.protocol.following(role, section, blocks)
        self._follow = self._section.__enter__()

    def end(self) -> None:
        if self._section is not None:
            self._section.__exit__(None, None, None)
        self._section = self._follow = None
