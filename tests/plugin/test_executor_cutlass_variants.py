"""Which compiled kernel a step takes, as tables: tiles of rows, pages, layouts, precisions, short steps, and pieces.

Rows stand on both sides of each tile (16, 32, 64, 128), keys on both sides of 512, pages on both sides of a box.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from cases.steps import StepCase, build_step

from pagedmla import get_layout
from pagedmla.cutlass_kernels.variants import PAGE_SIZES, VARIANTS
from pagedmla.plugin import executor_cutlass_variants as variants
from pagedmla.plugin.executors import PRECISIONS, AttendOptions, Capacity, Configuration
from pagedmla.plugin.step import bind_step

USUAL = Configuration("attend", torch.device("cpu"), get_layout("fp8_rope_bf16"), 16, 64, torch.bfloat16)


def name(variant: object) -> str:
    return variant.name.removeprefix("mla_decode_").removesuffix("_bf16")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("heads", "query_tokens", "tile"),
    [  # of "fp8", which alone is built for 128 rows
        (1, 1, 16), (1, 16, 16), (1, 17, 32), (16, 1, 16), (16, 2, 32), (16, 3, 64), (16, 4, 64), (16, 5, 128),
        (16, 4000, 128), (17, 1, 32), (32, 1, 32), (33, 1, 64), (64, 1, 64), (65, 1, 128), (128, 1, 128), (128, 4, 128),
        (16, 0, 16),
    ],
)  # fmt: skip
def test_the_tile_holds_the_rows_of_a_request(heads: int, query_tokens: int, tile: int) -> None:
    """The smallest that does; more rows than a form's largest tile holds take several of those."""
    usual = replace(USUAL, num_heads=heads)
    variant = variants.choose_variant(replace(usual, precision="fp8"), query_tokens, 4096)
    assert (variant.rows, variant.cluster) == (tile, 2 if tile == 128 else 1)
    for precision, largest in (("auto", 64), ("fp8x2", 64), ("fp16", 32)):
        variant = variants.choose_variant(replace(usual, precision=precision), query_tokens, 4096)
        assert (variant.rows, variant.cluster) == (min(tile, largest), 1)


FORMS = {  # precision: the form at 16, 32, 64 and 128 rows, from 512 keys on and below
    "auto": ("fp16_r16 fp8x2_r32 fp8x2_r64 fp8x2_r64", "fp16_r16 fp16_r32 fp16_r32 fp16_r32"),
    "fp8": ("fp8x2_r16 fp8x2_r32 fp8x1_r64 fp8x1_r128", "fp8x2_r16 fp8x2_r32 fp8x1_r64 fp8x1_r128"),
    "fp8x2": ("fp8x2_r16 fp8x2_r32 fp8x2_r64 fp8x2_r64", "fp8x2_r16 fp8x2_r32 fp8x2_r64 fp8x2_r64"),
    "fp16": ("fp16_r16 fp16_r32 fp16_r32 fp16_r32", "fp16_r16 fp16_r32 fp16_r32 fp16_r32"),
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_form_is_what_was_asked_for(precision: str) -> None:
    """What isn't built for so many rows takes its largest tile: float16 of 32 rows, two terms of 64."""
    for keys, forms in zip((512, 511), FORMS[precision], strict=True):
        for rows, form in zip((16, 32, 64, 128), forms.split(), strict=True):
            variant = variants.choose_variant(replace(USUAL, num_heads=rows, precision=precision), 1, keys)
            assert f"_{form}_" in variant.name, (rows, keys)


@pytest.mark.parametrize(("page_size", "boxes"), [(16, (16, 16)), (32, (32, 32)), (64, (64, 32)), (256, (64, 32))])
def test_pages_choose_the_box(page_size: int, boxes: tuple[int, int]) -> None:
    """The second box is that of a cluster, whose CTAs copy half a tile of keys each."""
    usual = replace(USUAL, page_size=page_size, precision="fp8")
    chosen = [variants.choose_variant(replace(usual, num_heads=heads), 1, 4096) for heads in (16, 128)]
    assert tuple(variant.box for variant in chosen) == boxes
    assert all(page_size in variant.page_sizes for variant in chosen)


@pytest.mark.parametrize("layout", ["fp8_rope_bf16", "fp8_rope_bf16_prescaled", "fp8_flat"])
def test_every_choice_is_a_built_variant_of_the_layout(layout: str) -> None:
    taken = set()
    for precision in PRECISIONS:
        for page_size in PAGE_SIZES:
            for heads in (1, 8, 16, 32, 64, 128):
                usual = replace(
                    USUAL, layout=get_layout(layout), page_size=page_size, num_heads=heads, precision=precision
                )
                assert variants.refusal(usual) is None
                taken |= set(variants.choices(usual))
    assert taken == {variant for variant in VARIANTS if variant.layout == layout}, "a variant that nothing takes"


def test_uses_tell_which_rows_take_which_kernel() -> None:
    told = [f"{use}: {name(use.variant)}" for use in variants.uses(USUAL, Capacity(128, 8192, 4096))]
    assert told == [
        "1 query token a request: fp8_rope_bf16_fp16_r16_b64",
        "2 query tokens a request: fp8_rope_bf16_fp8x2_r32_b64",
        "3 or more query tokens a request: fp8_rope_bf16_fp8x2_r64_b64",
        "2 or more query tokens a request, under 512 keys: fp8_rope_bf16_fp16_r32_b64",
    ]
    short = [f"{use}: {name(use.variant)}" for use in variants.uses(USUAL, Capacity(128, 8192, 300))]
    assert short == [
        "1 query token a request: fp8_rope_bf16_fp16_r16_b64",
        "2 or more query tokens a request: fp8_rope_bf16_fp16_r32_b64",
    ]
    told = [
        f"{use}: {name(use.variant)}"
        for use in variants.uses(replace(USUAL, precision="fp8"), Capacity(128, 8192, 4096))
    ]
    assert told == [
        "1 query token a request: fp8_rope_bf16_fp8x2_r16_b64",
        "2 query tokens a request: fp8_rope_bf16_fp8x2_r32_b64",
        "3 to 4 query tokens a request: fp8_rope_bf16_fp8x1_r64_b64",
        "5 or more query tokens a request: fp8_rope_bf16_fp8x1_r128_b32",
    ]
    # A plan of one token loaded, explained and made room for kernels that no step of it could take.
    told = [f"{use}: {name(use.variant)}" for use in variants.uses(USUAL, Capacity(1, 1, 4096))]
    assert told == ["1 query token a request: fp8_rope_bf16_fp16_r16_b64"]
    (one,) = variants.uses(replace(USUAL, num_heads=128, precision="fp16"), Capacity(128, 8192, 300))
    assert (str(one), name(one.variant)) == ("1 or more query tokens a request", "fp8_rope_bf16_fp16_r32_b64")


@pytest.mark.parametrize("heads", [1, 5, 16, 24, 48, 100, 128])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_uses_agree_with_the_choice(heads: int, precision: str) -> None:
    """What a plan loads is what its steps take: a kernel loaded in a captured step would break the capture."""
    usual = replace(USUAL, num_heads=heads, precision=precision)
    for most_keys in (300, 511, 512, 4096):
        listed = variants.uses(usual, Capacity(128, 8192, most_keys))
        for query_tokens in range(1, 2 + 128 // heads):
            for keys in (64, min(511, most_keys), most_keys):
                fitting = [
                    use.variant
                    for use in reversed(listed)  # the exception for short steps stands behind the rule
                    if use.fewest <= query_tokens <= (use.most or query_tokens) and (keys < 512 or not use.short)
                ]
                assert fitting[0] is variants.choose_variant(usual, query_tokens, keys)


def test_a_step_is_chosen_for_by_bounds_alone() -> None:
    """Decode rows beside a long prompt go by their own mean; a plan's bound on keys counts where it is lower."""
    options = AttendOptions(0.04, True, 1, None)
    step = build_step(StepCase((2, 2, 19), (700, 600, 600), page_size=64, heads=16), "fp8_rope_bf16")
    q = step.q.to(torch.bfloat16)
    bound = bind_step(step.values, step.layer, step.layout, step.query_start_loc, q, "q")

    def taken(requests: int, tokens: int, **changes: Any) -> str:
        return name(variants.variant_of_step(bound, q, replace(options, **changes), requests, tokens))

    assert taken(2, 4) == "fp8_rope_bf16_fp8x2_r32_b64"
    assert taken(2, 4, precision="fp8") == "fp8_rope_bf16_fp8x2_r32_b64"
    assert taken(3, 23) == "fp8_rope_bf16_fp8x2_r64_b64"
    assert taken(3, 23, max_keys=512) == "fp8_rope_bf16_fp8x2_r64_b64"
    assert taken(3, 23, max_keys=511) == "fp8_rope_bf16_fp16_r32_b64"
    assert taken(3, 23, precision="fp16") == "fp8_rope_bf16_fp16_r32_b64"
    assert taken(3, 23, precision="fp8") == "fp8_rope_bf16_fp8x1_r128_b32"


def test_how_many_pieces_a_request_may_have() -> None:
    """One for each of 132 workers, none under 128 keys. Room for 2 ** 17 rows in all kept a long request of 128 heads
    among 127 short ones in 8 pieces, 3.4 even shares long: pieces lie by worker now, however many rows there are.
    """
    counts = {
        (heads, requests, tokens, keys): variants.pieces(
            replace(USUAL, num_heads=heads), Capacity(1024, 8192, keys), requests, tokens, 132
        )
        for heads, requests, tokens in ((16, 0, 0), (16, 1, 1), (16, 128, 128), (16, 8, 64),
                                        (128, 1, 1), (128, 128, 128), (128, 1024, 8192))
        for keys in (255, 4096, 131072)
    }  # fmt: skip
    assert counts == {
        (16, 0, 0, 255): 1, (16, 0, 0, 4096): 1, (16, 0, 0, 131072): 1,
        (16, 1, 1, 255): 1, (16, 1, 1, 4096): 32, (16, 1, 1, 131072): 132,
        (16, 128, 128, 255): 1, (16, 128, 128, 4096): 32, (16, 128, 128, 131072): 132,
        (16, 8, 64, 255): 1, (16, 8, 64, 4096): 32, (16, 8, 64, 131072): 132,
        (128, 1, 1, 255): 1, (128, 1, 1, 4096): 32, (128, 1, 1, 131072): 132,
        (128, 128, 128, 255): 1, (128, 128, 128, 4096): 32, (128, 128, 128, 131072): 132,
        (128, 1024, 8192, 255): 1, (128, 1024, 8192, 4096): 32, (128, 1024, 8192, 131072): 132,
    }  # fmt: skip


def test_two_multiprocessors_of_a_cluster_are_one_worker() -> None:
    for precision, workers in (("auto", 132), ("fp8x2", 132), ("fp16", 132), ("fp8", 66)):
        usual = replace(USUAL, num_heads=128, precision=precision)
        assert variants.pieces(usual, Capacity(1, 1, 131072), 1, 1, 132) == workers


REFUSED = [
    ({"layout": get_layout("bf16")}, "its layouts are fp8_rope_bf16, fp8_rope_bf16_prescaled, fp8_flat with one scale "
                                     "a token or tensor, not bf16"),
    ({"layout": get_layout("fp8_ds_mla")}, "its layouts are .*, not fp8_ds_mla"),
    ({"layout": get_layout("fp8_flat", granularity=128)}, r"its layouts are .*, not fp8_flat \(granularity 128\)"),
    ({"layout": get_layout("fp8_rope_bf16", latent=256)}, "it takes a latent of 512 and a rope of 64, not 256 and 64"),
    ({"page_size": 24}, "its pages have 16, 32, 64, 128, 256 tokens, not 24"),
    ({"page_size": 8}, "its pages have .* tokens, not 8"),
    ({"page_size": 512}, "its pages have .* tokens, not 512"),
    ({"dtype": torch.float16}, "it is built for queries in bfloat16, not float16"),
    ({"dtype": torch.float32}, "it is built for queries in bfloat16, not float32"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_no_variant_takes(changes: dict[str, object], message: str) -> None:
    reason = variants.refusal(replace(USUAL, **changes))  # type: ignore[arg-type]
    assert reason is not None
    assert re.fullmatch(message, reason)
