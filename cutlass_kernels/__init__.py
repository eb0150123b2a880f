"""FP8 decode for Hopper in the CUTLASS Python DSL: the kernel, its executable model, and what builds and launches it.

Importing this package loads nothing. `tiles`, `fragments`, `schedule`, `protocol` and `variants` are plain Python that
the kernel and the model share; `decode_sm90` and its parts need the DSL (`pip install pagedmla[cutlass]`).
"""
