"""Triton kernels for paged MLA: store, prefill, mixed, portable decode, decompress, merge.

Importing this package loads nothing: each operation is a module of its own that imports Triton when it is itself
imported. `variants` lists what may be compiled and needs no Triton; `device` holds the steps that kernels share, one
small module each.
"""

KERNELS = (
    "decode", "mixed", "pieces", "schedule", "records", "merge_cuts", "merge", "prefill", "decompress", "store",
)  # fmt: skip
"""Names of what `variants` lists, in the order in which they are told."""
