"""A process of its own for one engine: `python serve.py request.json answer.json`.

request  {"engine": keywords of vllm.LLM, "passes": [{"prompts": [[id]], "max_tokens": n}], "block_fp8": bool}
answer   {"passes": [{"requests": [{"prompt", "tokens", "logprobs": [{id: logprob}], "cached"}],
                      "calls": [[layer, kind, executor, number]]}],
          "layers": {layer: what serves it}, "metrics": {name: number}}

Environment variables are the caller's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ENGINE = {
    "attention_backend": "CUSTOM",
    "worker_extension_cls": "pagedmla.plugin.vllm.counters.CountsExtension",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "disable_log_stats": False,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "seed": 0,
}


def answer(request: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM

    if request.get("block_fp8"):
        allow_block_fp8()
    llm = LLM(**{**ENGINE, **request["engine"]})
    llm.collective_rpc("pagedmla_counts", args=(True,))
    passes = [one_pass(llm, each) for each in request["passes"]]
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    layers = of_workers(llm.collective_rpc("pagedmla_layers"))
    return {"passes": passes, "layers": layers, "metrics": metrics}


def of_workers(found: list[Any]) -> Any:
    """What every worker of a tensor-parallel engine says alike."""
    first, *others = found
    assert all(other == first for other in others), found
    return first


def allow_block_fp8() -> None:
    """Let the CPU engine load block-FP8 weights, which it multiplies by on AMX alone, and fail if it does multiply."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    class LoadedOnly(linear.CPUFp8BlockScaledMMKernel):  # type: ignore[misc]
        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_weights(self, layer: Any, x: Any, bias: Any = None, **more: Any) -> Any:
            raise AssertionError("MLA reads W_UK and W_UV, not the product with kv_b_proj")

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(LoadedOnly)


def one_pass(llm: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    greedy = SamplingParams(
        temperature=0.0, max_tokens=wanted["max_tokens"], ignore_eos=True, detokenize=False, logprobs=5
    )
    inputs = [{"prompt_token_ids": prompt} for prompt in wanted["prompts"]]
    outputs = llm.generate(inputs, greedy, use_tqdm=False)
    requests = [
        {
            "prompt": prompt,
            "tokens": list(output.outputs[0].token_ids),
            "logprobs": [{str(i): entry.logprob for i, entry in step.items()} for step in output.outputs[0].logprobs],
            "cached": output.num_cached_tokens,
        }
        for prompt, output in zip(wanted["prompts"], outputs, strict=True)
    ]
    calls = of_workers(llm.collective_rpc("pagedmla_counts", args=(True,)))
    return {"requests": requests, "calls": calls}


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(answer(json.loads(source.read_text()))))
