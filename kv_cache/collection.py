"""The paged cache as MAX documents it: a collection of layers, addressed through two tables.

With P the page size, g the quantisation granularity and both page strides as in `paged_tensor`:

    page, slot  = divmod(tok, P)
    value elem  = lookup_table[bs, page]        -> values[id, kv, layer, slot, head, dim]
    scale elem  = scales_lookup_table[bs, page] -> scales[id, kv, layer, slot, head, dim // g]
    load        = cast(cast<scale dtype>(value) * scale)

All index arguments are int64 tensors (or ints) that broadcast against each other. This is the executable meaning of the
interface, vectorised in torch; kernels do the same arithmetic.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from pagedmla.kv_cache.checks import (
    INDEX_DTYPES,
    DroppedStoreWarning,
    IndexRefusal,
    Refusal,
    ceildiv,
    checks_enabled,
    counted,
    describe,
    expect_int,
    expect_same_device,
    expect_tensor,
    host_int,
    refuse,
)
from pagedmla.kv_cache.paged_tensor import PagedTensor, raw_view
from pagedmla.kv_cache.quantise import saturating_cast
from pagedmla.kv_cache.tables import ids_at, int64_lengths

POOL_SCALE_DTYPES = (torch.float32, torch.float16, torch.float8_e8m0fnu)

Index = Tensor | int


@dataclass(frozen=True)
class KVCacheStaticParams:
    """What a cache is at compile time: KV heads on this device, elements a row, and whether K and V share a row."""

    num_heads: int
    head_size: int
    is_mla: bool


@dataclass(frozen=True, eq=False)
class PagedKVCacheCollection:
    """Every layer of a paged cache; owns no memory. Made by `generic_get_paged_cache` and `..._with_scales`.

    blocks         [num_blocks, kv_dim, num_layers, page_size, num_heads, head_dim]
    scales         [num_scale_blocks, kv_dim, num_layers, page_size, num_heads, ceildiv(head_dim, granularity)] or None
    cache_lengths  [batch] uint32 or int32: tokens in the cache before this step
    tables         [batch, max_pages] uint32 or int32: page ids of the value pool and of the scale pool
    """

    value_pool: PagedTensor
    scale_pool: PagedTensor | None
    cache_lengths: Tensor
    lookup_table: Tensor
    scales_lookup_table: Tensor
    max_prompt_length: int
    max_cache_length: int
    kv_params: KVCacheStaticParams
    quantization_granularity: int

    @property
    def blocks(self) -> Tensor:
        return self.value_pool.tensor

    @property
    def scales(self) -> Tensor | None:
        return None if self.scale_pool is None else self.scale_pool.tensor

    @property
    def page_size(self) -> int:
        return self.value_pool.page_size

    @property
    def num_layers(self) -> int:
        return self.blocks.shape[2]

    @property
    def head_dim_granularity(self) -> int:
        """Scales along one row: ceildiv(head_dim, granularity); 1 where there are no scales."""
        return 1 if self.scales is None else self.scales.shape[5]

    def cache_length(self, bs: int) -> int:
        """Tokens that row `bs` had in the cache before this step."""
        bs = expect_int(bs, "bs")
        if not 0 <= bs < self.cache_lengths.shape[0]:
            raise IndexRefusal(f"cache_length: row {bs} is out of range for a batch of {self.cache_lengths.shape[0]}")
        return int(int64_lengths(self.cache_lengths)[bs])

    def get_key_cache(self, layer: int) -> PagedKVCache:
        return PagedKVCache(self, 0, self._layer(layer))

    def get_value_cache(self, layer: int) -> PagedKVCache:
        if self.kv_params.is_mla:
            raise Refusal(
                "get_value_cache: an MLA cache stores no values of its own (kv_dim 1); "
                "they are the latent columns of get_key_cache"
            )
        return PagedKVCache(self, 1, self._layer(layer))

    def _layer(self, layer: int) -> int:
        layer = expect_int(layer, "layer")
        if not 0 <= layer < self.num_layers:
            raise IndexRefusal(f"layer: {layer} is out of range for a cache of {counted(self.num_layers, 'layer')}")
        return layer


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """One layer of K, or of V. Reads and writes go through the tables of the collection it came from."""

    collection: PagedKVCacheCollection
    kv: int
    layer: int

    # -- reading -----------------------------------------------------------------------------------------------------

    def load(self, bs: Index, head: Index, tok: Index, dim: Index, output_dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantised elements in `output_dtype`; each takes its own group's scale, multiplied in the scale's dtype.

        float8_e8m0fnu scales have no arithmetic: they multiply in float32, exactly (powers of two).
        """
        quantized = self.load_quantized(bs, head, tok, dim)
        if self.collection.scales is None:
            return quantized.to(output_dtype)
        scale = self.load_scale(bs, head, tok, dim)
        product_dtype = torch.float32 if scale.dtype == torch.float8_e8m0fnu else scale.dtype
        return (quantized.to(product_dtype) * scale.to(product_dtype)).to(output_dtype)

    def load_quantized(self, bs: Index, head: Index, tok: Index, dim: Index) -> Tensor:
        """Elements as they are stored, in the pool's dtype."""
        pool = self.collection.value_pool
        return pool.flat()[self._value_offsets(bs, head, tok, dim)].view(pool.tensor.dtype)

    def load_scale(self, bs: Index, head: Index, tok: Index, dim: Index) -> Tensor:
        """The scale of each element's group, in the scale pool's dtype. `dim` is an element column, not a group."""
        pool = self._scale_pool("load_scale")
        return pool.flat()[self._scale_offsets(bs, head, tok, dim)].view(pool.tensor.dtype)

    # -- writing -----------------------------------------------------------------------------------------------------

    def store(
        self, bs: Index, head: Index, tok: Index, dim: Index, value: Tensor | float, *, check: bool | None = None
    ) -> None:
        """Write elements, cast to the pool's dtype (saturating). Not quantised: the caller divides by its scale.

        An element whose page id lies outside the pool is dropped with a DroppedStoreWarning; with `check` (or
        PAGEDMLA_CHECK=1) it raises IndexError, and nothing at all is written.
        """
        pool, table = self.collection.value_pool, self.collection.lookup_table
        bs, head, tok, dim = self._broadcast(bs, head, tok, dim)
        self._check_element(head, dim)
        page, keep = self._pages_to_store(bs, tok, table, pool, "lookup_table", check)
        offsets = pool.offsets(page, self.kv, self.layer, tok % self.collection.page_size, head, dim)
        self._write(pool, offsets, keep, value)

    def store_scale(
        self, bs: Index, head: Index, tok: Index, dim: Index, scale: Tensor | float, *, check: bool | None = None
    ) -> None:
        """Write the scale of each element's group (`dim` is an element column), as `store` writes elements."""
        pool = self._scale_pool("store_scale")
        bs, head, tok, dim = self._broadcast(bs, head, tok, dim)
        self._check_element(head, dim)
        table = self.collection.scales_lookup_table
        page, keep = self._pages_to_store(bs, tok, table, pool, "scales_lookup_table", check)
        group = dim // self.collection.quantization_granularity
        offsets = pool.offsets(page, self.kv, self.layer, tok % self.collection.page_size, head, group)
        self._write(pool, offsets, keep, scale)

    # -- rows and views ----------------------------------------------------------------------------------------------

    def row_idx(self, bs: Index, tok: Index) -> Tensor:
        """Row of each token in this layer's view of the value pool, int64, counted in rows of one slot."""
        return self._rows(bs, tok, self.collection.value_pool, self.collection.lookup_table, "lookup_table")

    def scale_row_idx(self, bs: Index, tok: Index) -> Tensor:
        """The same for the scale pool."""
        pool = self._scale_pool("scale_row_idx")
        return self._rows(bs, tok, pool, self.collection.scales_lookup_table, "scales_lookup_table")

    @property
    def num_kv_rows(self) -> int:
        """Rows that this layer's view of the value pool spans."""
        return _row_span(self.collection.value_pool)

    @property
    def num_scale_rows(self) -> int:
        return _row_span(self._scale_pool("num_scale_rows"))

    def block_paged_view(self, bs: int, tok: int, tile: int) -> Tensor:
        """`tile` consecutive tokens from `tok` on, as a view `[tile, num_heads, head_dim]` into their page.

        `tile` divides the page size, and the tokens stay within one page.
        """
        page_size = self.collection.page_size
        if tile < 1 or page_size % tile:
            refuse("tile", f"a divisor of the page size {page_size}", tile)
        if tok % page_size + tile > page_size:
            refuse("tok", f"{tile} tokens within one page of {page_size}", f"tokens {tok}..{tok + tile - 1}")
        pool, table = self.collection.value_pool, self.collection.lookup_table
        page = int(self._pages(torch.tensor(bs), torch.tensor(tok), table, pool, "lookup_table"))
        inner = pool.tensor[:1, self.kv, self.layer]
        start = inner.storage_offset() + page * pool.page_stride + (tok % page_size) * inner.stride(1)
        return inner.as_strided((tile, *inner.shape[2:]), inner.stride()[1:], start)

    # -- addressing --------------------------------------------------------------------------------------------------

    def _scale_pool(self, caller: str) -> PagedTensor:
        if self.collection.scale_pool is None:
            raise Refusal(f"{caller}: this cache has no scales; make it with generic_get_paged_cache_with_scales")
        return self.collection.scale_pool

    def _value_offsets(self, bs: Index, head: Index, tok: Index, dim: Index) -> Tensor:
        pool = self.collection.value_pool
        bs, head, tok, dim = self._broadcast(bs, head, tok, dim)
        self._check_element(head, dim)
        page = self._pages(bs, tok, self.collection.lookup_table, pool, "lookup_table")
        return pool.offsets(page, self.kv, self.layer, tok % self.collection.page_size, head, dim)

    def _scale_offsets(self, bs: Index, head: Index, tok: Index, dim: Index) -> Tensor:
        pool = self._scale_pool("load_scale")
        bs, head, tok, dim = self._broadcast(bs, head, tok, dim)
        self._check_element(head, dim)
        page = self._pages(bs, tok, self.collection.scales_lookup_table, pool, "scales_lookup_table")
        group = dim // self.collection.quantization_granularity
        return pool.offsets(page, self.kv, self.layer, tok % self.collection.page_size, head, group)

    def _rows(self, bs: Index, tok: Index, pool: PagedTensor, table: Tensor, table_name: str) -> Tensor:
        bs, tok = self._broadcast(bs, tok)
        page = self._pages(bs, tok, table, pool, table_name)
        return page * _rows_per_page(pool) + tok % self.collection.page_size

    def _broadcast(self, *index: Index) -> tuple[Tensor, ...]:
        tensors = [torch.as_tensor(i, device=self.collection.blocks.device) for i in index]
        for tensor in tensors:
            if tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
                refuse("index", "integers", tensor, error=TypeError)
        return tuple(torch.broadcast_tensors(*(tensor.to(torch.int64) for tensor in tensors)))

    def _check_element(self, head: Tensor, dim: Tensor) -> None:
        params = self.collection.kv_params
        _expect_range(head, "head", params.num_heads)
        _expect_range(dim, "dim", params.head_size)

    def _table_ids(self, bs: Tensor, tok: Tensor, table: Tensor, table_name: str) -> Tensor:
        """Page ids as the table has them; rows and columns are checked, ids not yet."""
        _expect_range(bs, "bs", table.shape[0])
        if _readable(tok) and tok.numel() and int(tok.min()) < 0:
            raise IndexRefusal(f"tok: {int(tok.min())} is negative")
        column = tok // self.collection.page_size
        if _readable(column) and column.numel() and int(column.max()) >= table.shape[1]:
            at = int(column.argmax())
            raise IndexRefusal(
                f"{table_name}: row {int(bs.flatten()[at])} needs column {int(column.max())} for token "
                f"{int(tok.flatten()[at])} in pages of {self.collection.page_size}; got {table.shape[1]} columns"
            )
        return ids_at(table, bs, column)

    def _pages(self, bs: Tensor, tok: Tensor, table: Tensor, pool: PagedTensor, table_name: str) -> Tensor:
        page = self._table_ids(bs, tok, table, table_name)
        if _readable(page):
            outside = pool.outside(page)
            if bool(outside.any()):
                raise IndexRefusal(self._outside(outside, page, bs, tok, pool, table_name))
        return page

    def _pages_to_store(
        self, bs: Tensor, tok: Tensor, table: Tensor, pool: PagedTensor, table_name: str, check: bool | None
    ) -> tuple[Tensor, Tensor]:
        page = self._table_ids(bs, tok, table, table_name)
        outside = pool.outside(page)
        if (_readable(page) or checks_enabled(check)) and bool(outside.any()):
            message = self._outside(outside, page, bs, tok, pool, table_name)
            if checks_enabled(check):
                raise IndexRefusal(message)
            warnings.warn(f"{message}; {int(outside.sum())} elements dropped", DroppedStoreWarning, stacklevel=3)
        return page, ~outside

    def _outside(
        self, outside: Tensor, page: Tensor, bs: Tensor, tok: Tensor, pool: PagedTensor, table_name: str
    ) -> str:
        at = int(outside.flatten().to(torch.uint8).argmax())
        column = int(tok.flatten()[at]) // self.collection.page_size
        place = f"row {int(bs.flatten()[at])}, column {column}"
        return pool.names_outside(table_name, place, int(page.flatten()[at]))

    def _write(self, pool: PagedTensor, offsets: Tensor, keep: Tensor, value: Tensor | float) -> None:
        source = torch.as_tensor(value, device=pool.tensor.device)
        encoded = raw_view(saturating_cast(source, pool.tensor.dtype))
        try:
            encoded = encoded.expand(offsets.shape)
        except RuntimeError:
            refuse("value", f"a number, or numbers for the {list(offsets.shape)} elements of the index", source)
        pool.flat()[offsets[keep]] = encoded[keep]


def generic_get_paged_cache(
    blocks: Tensor,
    cache_lengths: Tensor,
    lookup_table: Tensor,
    max_prompt_length: Tensor | int,
    max_cache_length: Tensor | int,
    *,
    kv_params: KVCacheStaticParams | None = None,
    page_size: int | None = None,
    page_stride: Tensor | int | None = None,
) -> PagedKVCacheCollection:
    """A paged cache without scales. Shapes and dtypes: `PagedKVCacheCollection`.

    `max_prompt_length` and `max_cache_length` are upper bounds (ints or one-element host tensors). `kv_params` and
    `page_size` are read off `blocks` when absent and checked against it when given. `page_stride` is in elements; -1
    or None means `blocks.stride(0)`. Raises TypeError and ValueError that name the tensor; reads no device value.
    """
    return bind_collection(
        blocks,
        cache_lengths,
        lookup_table,
        max_prompt_length,
        max_cache_length,
        kv_params=kv_params,
        page_size=page_size,
        page_stride=page_stride,
    )


def generic_get_paged_cache_with_scales(
    blocks: Tensor,
    cache_lengths: Tensor,
    lookup_table: Tensor,
    max_prompt_length: Tensor | int,
    max_cache_length: Tensor | int,
    scales: Tensor,
    scales_lookup_table: Tensor | None = None,
    *,
    kv_params: KVCacheStaticParams | None = None,
    page_size: int | None = None,
    quantization_granularity: int | None = None,
    page_stride: Tensor | int | None = None,
    scales_page_stride: Tensor | int | None = None,
) -> PagedKVCacheCollection:
    """A quantised paged cache whose scales are paged on their own; absent, their table is the values' table.

    `quantization_granularity` (elements of a row that share a scale) is read off the shapes where they leave no doubt.
    The rest as in `generic_get_paged_cache`.
    """
    return bind_collection(
        blocks,
        cache_lengths,
        lookup_table,
        max_prompt_length,
        max_cache_length,
        expect_tensor(scales, "scales", [None] * 6, POOL_SCALE_DTYPES),
        scales_lookup_table,
        kv_params=kv_params,
        page_size=page_size,
        quantization_granularity=quantization_granularity,
        page_stride=page_stride,
        scales_page_stride=scales_page_stride,
    )


def bind_collection(
    blocks: Tensor,
    cache_lengths: Tensor,
    lookup_table: Tensor,
    max_prompt_length: Tensor | int,
    max_cache_length: Tensor | int,
    scales: Tensor | None = None,
    scales_lookup_table: Tensor | None = None,
    *,
    kv_params: KVCacheStaticParams | None = None,
    page_size: int | None = None,
    quantization_granularity: int | None = None,
    page_stride: Tensor | int | None = None,
    scales_page_stride: Tensor | int | None = None,
    prefix: str = "",
) -> PagedKVCacheCollection:
    """Both of the above; refusals call the pools `prefix` + "blocks" and "scales"."""
    blocks_name, scales_name = f"{prefix}blocks", f"{prefix}scales"
    params, pool = _bind_blocks(blocks, blocks_name, kv_params, page_size, page_stride)
    granularity, scale_pool = params.head_size, None
    if scales is not None:
        granularity = _check_scales(blocks, scales, prefix, quantization_granularity)
        expect_same_device(blocks, blocks_name, **{scales_name: scales})
        scale_pool = PagedTensor.bind(scales, scales_name, scales_page_stride)
    tables = {"lookup_table": lookup_table, "scales_lookup_table": scales_lookup_table}
    _check_tables(blocks, blocks_name, cache_lengths, **tables)
    return PagedKVCacheCollection(
        pool,
        scale_pool,
        cache_lengths,
        lookup_table,
        lookup_table if scales_lookup_table is None else scales_lookup_table,
        host_int(max_prompt_length, "max_prompt_length"),
        host_int(max_cache_length, "max_cache_length"),
        params,
        granularity,
    )


def _bind_blocks(
    blocks: Tensor,
    name: str,
    kv_params: KVCacheStaticParams | None,
    page_size: int | None,
    page_stride: Tensor | int | None,
) -> tuple[KVCacheStaticParams, PagedTensor]:
    layout = "Pools are [num_blocks, kv_dim, num_layers, page_size, num_heads, head_dim]."
    expect_tensor(blocks, name, [None] * 6, (), layout)
    _, kv_dim, _, slots, num_heads, head_dim = blocks.shape
    if blocks.dtype == torch.bool or blocks.dtype.is_complex:
        refuse(name, "real numbers", blocks)
    if kv_dim not in (1, 2):
        refuse(name, "kv_dim (dimension 1) of 1 for MLA or 2 for K and V", blocks, layout)
    params = KVCacheStaticParams(num_heads, head_dim, is_mla=kv_dim == 1)
    if kv_params is not None and kv_params != params:
        refuse("kv_params", f"{params}, read off {name} {describe(blocks)}", kv_params)
    if page_size is not None and page_size != slots:
        refuse("page_size", f"{slots}, dimension 3 of {name} {describe(blocks)}", page_size)
    if slots < 1:
        refuse(name, "a page size (dimension 3) of at least 1", blocks, layout)
    return params, PagedTensor.bind(blocks, name, page_stride)


def _check_scales(blocks: Tensor, scales: Tensor, prefix: str, granularity: int | None) -> int:
    name, head_dim = f"{prefix}scales", blocks.shape[5]
    expect_tensor(scales, name, [None] * 6, POOL_SCALE_DTYPES)
    groups = scales.shape[5]
    if granularity is None:
        if groups < 1 or head_dim % groups:
            refuse(
                "quantization_granularity",
                f"a number of elements, since {groups} scales don't divide a row of {head_dim} evenly",
                None,
            )
        granularity = head_dim // groups
    elif expect_int(granularity, "quantization_granularity") < 1:
        refuse("quantization_granularity", "at least 1", granularity)
    inner = [None, *blocks.shape[1:5], ceildiv(head_dim, granularity)]
    hint = f"It goes with {prefix}blocks {describe(blocks)} at quantization_granularity={granularity}."
    expect_tensor(scales, name, inner, POOL_SCALE_DTYPES, hint)
    return granularity


def _check_tables(blocks: Tensor, blocks_name: str, cache_lengths: Tensor, **tables: Tensor | None) -> None:
    expect_tensor(cache_lengths, "cache_lengths", [None], INDEX_DTYPES)
    batch = cache_lengths.shape[0]
    for name, table in tables.items():
        if table is not None or name == "lookup_table":
            expect_tensor(table, name, [batch, None], INDEX_DTYPES, f"The batch is {batch}, from cache_lengths.")
    expect_same_device(blocks, blocks_name, cache_lengths=cache_lengths, **tables)


def _rows_per_page(pool: PagedTensor) -> int:
    row = pool.tensor.stride(3)
    if row < 1 or pool.page_stride % row:
        refuse(
            f"page stride of {pool.name}",
            f"a whole number of rows of {row} elements",
            pool.page_stride,
            "Such pages have element addresses but no row numbers.",
        )
    return pool.page_stride // row


def _row_span(pool: PagedTensor) -> int:
    return (pool.num_pages - 1) * _rows_per_page(pool) + pool.page_size


def _readable(tensor: Tensor) -> bool:
    """Whether looking at values costs no device sync."""
    return tensor.device.type == "cpu"


def _expect_range(index: Tensor, name: str, bound: int) -> None:
    if _readable(index) and index.numel() and not 0 <= int(index.min()) <= int(index.max()) < bound:
        worst = int(index.min()) if int(index.min()) < 0 else int(index.max())
        raise IndexRefusal(f"{name}: {worst} is out of range for {bound}")


__all__ = [
    "POOL_SCALE_DTYPES",
    "KVCacheStaticParams",
    "PagedKVCache",
    "PagedKVCacheCollection",
    "bind_collection",
    "generic_get_paged_cache",
    "generic_get_paged_cache_with_scales",
]
