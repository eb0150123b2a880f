"""Triton kernels for paged MLA: store, prefill, mixed, portable decode, decompress, merge.

Importing this package loads nothing: each operation is a module of its own that imports Triton when it is itself
imported.

Operations: contract, host function, kernel

`store`         quantise a step's tokens and write them
`decompress`    cached tokens, dequantised, into a dense workspace
`prefill`       attention on dense keys and values
`mixed`         absorbed attention of a ragged step over the cache
`decode`        the same where all requests have the same few query tokens
`pieces`        the same with its work spread evenly, by a `schedule` made from the step's lengths
`merge`         partial states into one

What they share

`device`        the steps of a key token's walk, a small module each
`planes`        a pool as kernels are handed it
`attending`     the host's part of mixed, decode and pieces
`tiles`         which tile an attention kernel works in; needs no Triton
`launch`        where a kernel runs: on a GPU, or in the `interpreter` for CPU tensors

Builds without a GPU

`variants`      what may be compiled; needs no Triton until it is asked
`recording`     what a host function would launch
`compile`       every variant for every target, and what it costs
"""

KERNELS = (
    "decode", "mixed", "pieces", "schedule", "records", "merge_cuts", "merge", "prefill", "decompress", "store",
)  # fmt: skip
"""Names of what `variants` lists, in the order in which they are told."""
