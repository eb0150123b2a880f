"""A DeepSeek-V3-shaped checkpoint with random weights: two dense layers, latent 512, rope 64, eight heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
LAYERS = 2

# YaRN as in the real models: the engine's plain rotary embedding on the CPU rotates MLA's strided views wrongly (0.32).
ROPE = {
    "type": "yarn",
    "rope_type": "yarn",
    "factor": 4,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,  # no mixture of experts
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": ROPE,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """The checkpoint in `folder`; `changes` replace entries of CONFIG."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps({**CONFIG, **changes}, indent=1)
    (folder / "config.json").write_text(config)
    (folder / "generation_config.json").write_text('{"bos_token_id": 0, "eos_token_id": 1}')
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                gain = 4.0 if "embed" in name else 1.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * gain * weight.shape[1] ** -0.5)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(config)  # transformers renames keys that vLLM 0.29 still reads by the old names
    return folder


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random token ids, without the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def write_block_fp8_checkpoint(plain: Path, folder: Path) -> tuple[Path, Path]:
    """`plain` with kv_b_proj in e4m3, a scale for 128 x 128 weights, as real V3 and R1 checkpoints have it; and the
    same weights dequantised, for a Hugging Face forward.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(plain / "model.safetensors")
    quantised, dequantised = dict(weights), dict(weights)
    for name in [name for name in weights if name.endswith("kv_b_proj.weight")]:
        blocks = weights[name].float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))  # [rows, 128, columns, 128]
        scales = blocks.abs().amax((1, 3), keepdim=True) / 448
        codes = (blocks / scales).to(torch.float8_e4m3fn)
        quantised[name] = codes.flatten(2).flatten(0, 1).contiguous()
        quantised[f"{name}_scale_inv"] = scales.squeeze(3).squeeze(1).contiguous()
        dequantised[name] = (codes.float() * scales).flatten(2).flatten(0, 1).contiguous()
    config = json.loads((plain / "config.json").read_text())
    others = sorted({name.removesuffix(".weight") for name in weights if "kv_b_proj" not in name})
    method = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "ignored_layers": others,
    }
    targets = []
    for name, tensors, changes in (("fp8", quantised, {"quantization_config": method}), ("plain", dequantised, {})):
        target = folder / name
        target.mkdir()
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        (target / "config.json").write_text(json.dumps({**config, **changes}))
        targets.append(target)
    return targets[0], targets[1]


def write_mtp_checkpoint(folder: Path) -> Path:
    """One layer, and a draft layer that is its copy and looks at the embedding alone.

    So the draft says what the model will say, but for the first token, which draft layers don't see: drafts are
    accepted where, and only where, the draft layer's attention works.
    """
    from safetensors.torch import load_file, save_file

    write_checkpoint(folder, num_hidden_layers=1, first_k_dense_replace=2, num_nextn_predict_layers=1)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding /= embedding.square().mean(1, keepdim=True).sqrt()  # as the draft layer's norm makes it
    width = embedding.shape[1]
    draft = {
        name.replace("layers.0.", "layers.1."): tensor.clone()
        for name, tensor in weights.items()
        if "layers.0." in name
    }
    draft["model.layers.1.enorm.weight"] = torch.ones(width)
    draft["model.layers.1.hnorm.weight"] = torch.ones(width)
    draft["model.layers.1.eh_proj.weight"] = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
    draft["model.layers.1.embed_tokens.weight"] = embedding.clone()
    draft["model.layers.1.shared_head.norm.weight"] = weights["model.norm.weight"].clone()
    draft["model.layers.1.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    save_file({**weights, **draft}, folder / "model.safetensors", {"format": "pt"})
    return folder
