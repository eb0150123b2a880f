"""SGLang's own classes, where they are installed, put together as its model runner does; no engine is started.

Real: the published configuration, ReqToTokenPool, MLATokenToKVPool and ours over it, RadixAttention, ForwardBatch, the
inputs of speculative decoding, the forward context, the registries. Ours: the attributes of the model runner, and slots
given out by hand, in no order, since the engine's allocators launch GPU kernels.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

H, LATENT, ROPE, LAYERS, SCALING = 3, 512, 64, 2, 0.1
NOPE, VALUE = 16, 24  # of unabsorbed heads
CONTEXT, REQUESTS = 192, 6


@pytest.fixture(scope="session")
def sglang() -> Any:
    found = pytest.importorskip("sglang", reason="sglang isn't installed: `make test-sglang` installs it")
    if find_spec("torchvision") is None:
        _name_torchvision()
    return found


def _name_torchvision() -> None:
    """SGLang imports names of torchvision, for images; the builds that there are don't load beside a torch for CPUs."""
    import transformers  # noqa: F401 # it looks for torchvision once, and must not find this

    def any_name(name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object

    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.functional"):
        module = ModuleType(name)
        vars(module).update(__spec__=ModuleSpec(name, None), __getattr__=any_name)
        sys.modules[name] = module


@pytest.fixture
def published(sglang: Any) -> Iterator[Any]:
    """A published configuration that names our backend, as a started engine has one."""
    from sglang.srt.runtime_context import get_context, get_parallel

    with (
        get_context().override_server_args(
            attention_backend="pagedmla", chunked_prefill_size=64, device="cpu"
        ) as arguments,
        get_parallel().override(attn_dcp_rank=0, tp_group=None),
    ):
        yield arguments


class Request:
    def __init__(self, row: int) -> None:
        self.row = row
        self.cached = 0  # tokens in the cache
        self.slots: list[int] = []


class Engine:
    """A runner with its pools, layers and requests, and what was stored, for the oracle."""

    def __init__(self, pool: str, page_size: int, k_scale: float | None, dtype: torch.dtype, pages: int) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool

        from pagedmla.plugin.sglang.pool import PagedMLATokenToKVPool

        kinds = {
            "bf16": (MLATokenToKVPool, torch.bfloat16),
            "fp8_e4m3": (MLATokenToKVPool, torch.float8_e4m3fn),
            "fp8_rope_bf16": (PagedMLATokenToKVPool, torch.float8_e4m3fn),
        }
        make_pool, pool_dtype = kinds[pool]
        self.kind, self.page_size, self.dtype, self.k_scale = pool, page_size, dtype, k_scale
        self.pool = make_pool((pages - 1) * page_size, page_size, pool_dtype, LATENT, ROPE, LAYERS, "cpu", False)
        for buffer in self.pool.kv_buffer:
            buffer.view(torch.uint8)[page_size:].fill_(0xFF)  # NaN, but for the page of padding
        self.requests = ReqToTokenPool(REQUESTS, CONTEXT, "cpu", False)
        self.layers = [RadixAttention(H, LATENT + ROPE, SCALING, 1, i, v_head_dim=LATENT) for i in range(LAYERS)]
        for layer in self.layers:
            if k_scale is not None:
                layer.k_scale, layer.k_scale_float = torch.tensor(k_scale), k_scale
        self.runner = SimpleNamespace(
            token_to_kv_pool=self.pool,
            req_to_token_pool=self.requests,
            kv_index_translator=None,
            use_mla_backend=True,
            is_draft_worker=False,
            dtype=dtype,
            device="cpu",
            page_size=page_size,
            model_config=SimpleNamespace(
                num_attention_heads=H,
                scaling=SCALING,
                hf_config=SimpleNamespace(),
                kv_lora_rank=LATENT,
                qk_rope_head_dim=ROPE,
                qk_nope_head_dim=NOPE,
                v_head_dim=VALUE,
            ),
        )
        self._free = list(range(1, pages))
        random.Random(page_size).shuffle(self._free)
        self._given: dict[tuple[int, int], Tensor] = {}  # (layer, slot): the row as the model gave it
        self._generator = torch.Generator().manual_seed(7)

    # -- requests

    def request(self, shares: Request | None = None, tokens: int = 0) -> Request:
        """A new request, whose first `tokens` are another's: whole pages, as the radix cache shares them."""
        (row,) = self.requests.alloc_rows(1)
        made = Request(row)
        if shares is not None:
            assert tokens % self.page_size == 0
            made.slots = shares.slots[:tokens]
            self.requests.write((row, slice(0, tokens)), torch.tensor(made.slots, dtype=torch.int32))
            made.cached = tokens
        return made

    def _extend(self, request: Request, tokens: int) -> list[int]:
        while len(request.slots) < request.cached + tokens:
            page = self._free.pop()
            request.slots += range(page * self.page_size, (page + 1) * self.page_size)
        slots = request.slots[request.cached : request.cached + tokens]
        where = slice(request.cached, request.cached + tokens)
        self.requests.write((request.row, where), torch.tensor(slots, dtype=torch.int32))
        return slots

    # -- batches

    def batch(self, mode: str, members: list[tuple[Request, int]], **more: Any) -> Any:
        """A real ForwardBatch of requests with so many new tokens each, whose slots are taken now."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        slots = [slot for request, tokens in members for slot in self._extend(request, tokens)]
        counted = {"DECODE": 1, "TARGET_VERIFY": 0}
        seq_lens = [request.cached + counted.get(mode, tokens) for request, tokens in members]
        queries = [tokens for _, tokens in members]
        prefixes = [request.cached for request, _ in members]
        given: dict[str, Any] = {
            "forward_mode": ForwardMode[mode],
            "batch_size": len(members),
            "input_ids": torch.zeros(len(slots), dtype=torch.int64),
            "req_pool_indices": torch.tensor([request.row for request, _ in members]),
            "seq_lens": torch.tensor(seq_lens),
            "out_cache_loc": torch.tensor(slots),
            "seq_lens_sum": sum(seq_lens),
            "seq_lens_cpu": torch.tensor(seq_lens),
            "positions": torch.tensor([c + i for c, q in zip(prefixes, queries) for i in range(q)]),
        }
        if mode not in counted:
            given |= {
                "extend_num_tokens": len(slots),
                "extend_seq_lens": torch.tensor(queries, dtype=torch.int32),
                "extend_prefix_lens": torch.tensor(prefixes, dtype=torch.int32),
                "extend_seq_lens_cpu": queries,
                "extend_prefix_lens_cpu": prefixes,
            }
        return ForwardBatch(**{**given, **more})

    def verify_input(self, drafts: int, topk: int = 1) -> Any:
        from sglang.srt.speculative.eagle_info import EagleVerifyInput

        nothing = torch.empty(0, dtype=torch.int64)
        return EagleVerifyInput(
            draft_token=nothing, custom_mask=nothing, positions=nothing, retrieve_index=nothing,
            retrieve_next_token=nothing, retrieve_next_sibling=nothing, retrieve_cum_len=nothing,
            spec_steps=drafts - 1, topk=topk, draft_token_num=drafts, capture_hidden_mode=None,
            seq_lens_sum=0, seq_lens_cpu=nothing,
        )  # fmt: skip

    # -- forwards

    def forward(self, backend: Any, batch: Any, *, split: bool, save: bool = True) -> list[tuple[Tensor, Tensor]]:
        """Every layer's (queries `[T, H, 576]`, output `[T, H * 512]`), by the engine's own layer and context."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        made = []
        tokens = batch.out_cache_loc.shape[0]
        for layer in self.layers:
            q, rows = (
                torch.randn(shape, generator=self._generator).to(self.dtype)
                for shape in ((tokens, H, LATENT + ROPE), (tokens, 1, LATENT + ROPE))
            )
            q, rows = q / 4, rows * 2
            if save:
                self.gave(layer.layer_id, batch.out_cache_loc.tolist(), rows[:, 0])
            with forward_context(ForwardContext(attn_backend=backend), forward_batch=batch):
                if split:
                    latent, rope = rows.split([LATENT, ROPE], -1)
                    parts = q.split([LATENT, ROPE], -1)
                    out = layer(parts[0], latent, latent, batch, save, q_rope=parts[1], k_rope=rope)
                else:
                    out = layer(q.flatten(1), rows, rows[..., :LATENT], batch, save)
            made.append((q, out))
        return made

    def gave(self, layer: int, slots: list[int], rows: Tensor) -> None:
        """The model gave rows `[T, 576]` to slots."""
        for slot, row in zip(slots, rows.double(), strict=True):
            self._given[layer, slot] = row

    def stored(self, layer: int, slots: list[int]) -> Tensor:
        """Rows `[K, 576]` float64, decoded from the pool's bytes by their description alone."""
        rows = self.pool.kv_buffer[layer][slots, 0]
        if self.kind == "bf16":
            return rows.double()
        if self.kind == "fp8_e4m3":
            return rows.view(torch.float8_e4m3fn).double() * (1.0 if self.k_scale is None else self.k_scale)
        sigma = rows[:, 640:644].contiguous().view(torch.float32).double()
        latent = rows[:, :512].view(torch.float8_e4m3fn).double() * sigma
        return torch.cat((latent, rows[:, 512:640].contiguous().view(torch.bfloat16).double()), 1)

    def check_stored(self, layer: int, slots: list[int], noise: float = 0.0) -> None:
        """What lies in the pool is what the model gave, within half a step of its format.

        `noise` is what the model's own arithmetic may be off by from what we were told.
        """
        found = self.stored(layer, slots)
        given = torch.stack([self._given[layer, slot] for slot in slots])
        error = ((found - given).abs() - noise).clamp(min=0)
        if self.kind == "bf16":
            assert bool((error <= given.abs() * 2**-8).all())
            return
        latent, rope = error[:, :LATENT], error[:, LATENT:]
        scale = 1.0 if self.k_scale is None else self.k_scale
        if self.kind == "fp8_e4m3":
            assert bool((error <= (given.abs() * 2**-4).clamp(min=scale * 2**-10)).all())
            return
        step = given[:, :LATENT].abs().amax(1, keepdim=True) / 448 * 2**-10
        assert bool((latent <= torch.maximum(given[:, :LATENT].abs() * 2**-4, step) * 1.0001).all())
        assert bool((rope <= given[:, LATENT:].abs() * 2**-8).all())

    def expected(self, layer: int, q: Tensor, request: Request, cached: int) -> Tensor:
        """`[T, H, 512]` float64: dense causal attention of one request's queries over what was stored."""
        tokens = q.shape[0]
        rows = self.stored(layer, request.slots[: cached + tokens])
        logits = torch.einsum("thd,kd->thk", q.double(), rows) * SCALING
        seen = torch.arange(cached + tokens) <= torch.arange(cached, cached + tokens)[:, None]
        weights = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("thk,kd->thd", weights, rows[:, :LATENT])

    def run(
        self,
        backend: Any,
        mode: str,
        members: list[tuple[Request, int]],
        *,
        split: bool = False,
        accepted: list[int] | None = None,
        tolerance: float = 2e-5,
        **more: Any,
    ) -> float:
        """One step, checked in every layer: stored rows, and output against float64. The largest error."""
        batch = self.batch(mode, members, **more)
        backend.init_forward_metadata(batch)
        worst = 0.0
        for layer, (q, out) in enumerate(self.forward(backend, batch, split=split)):
            first = 0
            for request, tokens in members:
                mine = slice(first, first + tokens)
                self.check_stored(layer, request.slots[request.cached : request.cached + tokens])
                found = out[mine].view(tokens, H, LATENT).double()
                error = (found - self.expected(layer, q[mine], request, request.cached)).abs()
                assert bool((error < tolerance).all())
                worst, first = max(worst, float(error.max())), first + tokens
        for (request, _), kept in zip(members, accepted or [tokens for _, tokens in members]):
            request.cached += kept
        return worst


@pytest.fixture
def engine(published: Any) -> Callable[..., Engine]:
    def make(
        pool: str = "bf16",
        page_size: int = 16,
        *,
        k_scale: float | None = None,
        dtype: torch.dtype = torch.float32,
        pages: int | None = None,
    ) -> Engine:
        return Engine(pool, page_size, k_scale, dtype, pages or 12 + 400 // page_size)

    return make
