"""The kernels' arguments: order, packing and meaning. The launcher packs by it; the kernels' signatures repeat it.

A tensor map goes by value (128 bytes at a multiple of 64), a pointer as 8 bytes, a number as 4 or 8. Strides count
elements of their tensor. rows = T * H, rows of q and out in the order [token, head].
"""

from __future__ import annotations

from dataclasses import dataclass

MAP, POINTER, INT32, INT64, FLOAT32 = "map", "pointer", "int32", "int64", "float32"
SIZES = {MAP: 128, POINTER: 8, INT32: 4, INT64: 8, FLOAT32: 4}


@dataclass(frozen=True)
class Argument:
    name: str
    kind: str
    meaning: str


DECODE = (
    Argument("latent_map", MAP, "bytes [512, page_size, pages], box [128, box, 1], 128-byte swizzle"),
    Argument("rope_map", MAP, "bytes [128, page_size, pages] as above, or e4m3 [64, ...] with a 64-byte swizzle"),
    Argument("q", POINTER, "[T, H, 576] in the variant's dtype, 16-byte aligned rows"),
    Argument("lookup_table", POINTER, "[B, W] 32-bit ids"),
    Argument("scales", POINTER, "[pages, page_size] float32"),
    Argument("scales_lookup_table", POINTER, "[B, W] 32-bit ids"),
    Argument("cache_lengths", POINTER, "[B] int32"),
    Argument("query_start_loc", POINTER, "[B + 1] int32"),
    Argument("out", POINTER, "[T, H, 512] in the variant's dtype"),
    Argument("lse", POINTER, "[rows] float32, natural log"),
    Argument("partial_out", POINTER, "[schedule.partial_rows(), 512] float32"),
    Argument("partial_lse", POINTER, "[schedule.partial_rows()] float32"),
    Argument("cuts", POINTER, "[rows] int32, written: schedule.cut_of() each row"),
    Argument("stride_scale_page", INT64, "0: one scale for the tensor"),
    Argument("stride_scale_slot", INT64, "0: one scale for the tensor"),
    Argument("stride_q_token", INT64, "a multiple of 8"),
    Argument("stride_q_head", INT64, "a multiple of 8"),
    Argument("stride_out_token", INT64, "even"),
    Argument("stride_out_head", INT64, "even"),
    Argument("stride_table", INT32, "row stride of lookup_table"),
    Argument("stride_scales_table", INT32, "row stride of scales_lookup_table"),
    Argument("batch", INT32, "B"),
    Argument("tokens", INT32, "T, rows of q behind query_start_loc[B] included"),
    Argument("heads", INT32, "H"),
    Argument("page_shift", INT32, "log2 of the page size"),
    Argument("partitions", INT32, "pieces that a request may be cut into, at most CombineVariant.pieces"),
    Argument("causal", INT32, "1: a token sees keys up to its own position; 0: all"),
    Argument("scale_log2", FLOAT32, "sm_scale * log2(e)"),
)

COMBINE = (
    Argument("partial_out", POINTER, "[schedule.partial_rows(), 512] float32"),
    Argument("partial_lse", POINTER, "[schedule.partial_rows()] float32"),
    Argument("cuts", POINTER, "[rows] int32: schedule.cut_of() each row; those of one piece are left alone"),
    Argument("out", POINTER, "[T, H, 512] in the variant's dtype"),
    Argument("lse", POINTER, "[rows] float32, natural log"),
    Argument("stride_out_token", INT64, "even"),
    Argument("stride_out_head", INT64, "even"),
    Argument("rows", INT32, "T * H"),
    Argument("heads", INT32, "H"),
    Argument("tile_rows", INT32, "query rows of a worker of the decode kernel"),
)


def offsets(arguments: tuple[Argument, ...]) -> list[int]:
    """Byte of each argument in the parameter block: each is aligned to its own size, maps to 64."""
    places, offset = [], 0
    for argument in arguments:
        size = SIZES[argument.kind]
        offset = -(-offset // min(size, 64)) * min(size, 64)
        places.append(offset)
        offset += size
    return places
