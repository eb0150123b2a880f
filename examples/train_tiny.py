"""Train the model of examples/tiny_model/: a small DeepSeek-V3 that reads and writes bytes.

    python examples/train_tiny.py --output tiny_model
    python examples/train_tiny.py --output tiny_model --steps 3000    # better text

text       the language reference and the docstrings that ship with the running Python (PSF licence); a part is held out
model      latent 512, rope 64 and YaRN as in the real models, 3 dense layers of width 256, 4 heads, 4.6 million weights
training   AdamW, cosine, from a table of byte pairs; windows of 256 bytes, then of 1024, so that far keys are met too
output     a Hugging Face checkpoint in bf16, its tokenizer, held_out.txt and training.json

Needs transformers. Same seed, Python, torch and number of threads: same checkpoint.
"""

from __future__ import annotations

import ast
import hashlib
import json
import math
import platform
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy

LAYERS = 3
END = 256  # the one token that isn't a byte: between documents, begin and end of a text
VOCABULARY = 264  # 257 in use; a multiple of 8
WINDOW, LONG_WINDOW = 256, 1024  # tokens
LONG_PART = 0.1  # of the steps, at the end
TOKENS = 1024  # a step; small, since a short run gains more from steps than from smooth gradients
RATE, WARMUP = 1e-3, 50  # peak learning rate, steps to it
TABLE_RATE = 0.3  # of it for embeddings and lm_head, which begin near their place
HELD_OUT = 48 << 10  # bytes
GLANCE = 8 << 10  # of them, what a checkpoint on the way is tried on
REPORT_EVERY, KEEP_EVERY = 25, 150  # steps

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.03,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    # The old keys beside transformers' own: engines read them by these names.
    "rope_scaling": {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 512,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    # Every layer is dense; engines read the rest even so.
    "first_k_dense_replace": LAYERS,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.0,
    "bos_token_id": END,
    "eos_token_id": END,
    "torch_dtype": "bfloat16",
}


# Text: documents of the standard library, by name.


class Documents(NamedTuple):
    train: list[str]
    held_out: list[str]


class Tokens(NamedTuple):
    train: Tensor  # [tokens] int64
    held_out: Tensor


def named_documents() -> Iterator[tuple[str, str]]:
    """(name, text): topics of the language reference, then the docstrings of each module."""
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic {name}", topics[name].strip()
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        parts = set(Path(name).parts)
        if parts & {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "__phello__"}:
            continue
        text = "\n\n".join(docstrings(ast.parse(path.read_text(encoding="utf-8"))))
        if text:
            yield f"module {name}", text


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Each docstring of a module, a class's and a function's below its first line."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if not text:
            continue
        if isinstance(node, ast.Module):
            yield text
        elif isinstance(node, ast.ClassDef):
            yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))}):\n{indented(text)}"
        else:
            yield f"def {node.name}({ast.unparse(node.args)}):\n{indented(text)}"


def indented(text: str) -> str:
    quoted = f'"""{text}"""'
    return "\n".join(f"    {line}" if line else "" for line in quoted.splitlines())


def split_text() -> Documents:
    """Whole documents are held out, chosen by a hash of their names; paragraphs of theirs are taken out of the rest."""
    ordered = sorted(named_documents(), key=lambda named: hashlib.sha256(named[0].encode()).digest())
    held_out: list[str] = []
    train: list[str] = []
    for _, text in ordered:
        small = len(text) < HELD_OUT // 4  # so that several documents are held out
        (held_out if small and sum(map(len, held_out)) < HELD_OUT else train).append(text)
    seen = {paragraph for text in held_out for paragraph in text.split("\n\n")}
    train = ["\n\n".join(p for p in text.split("\n\n") if p not in seen) for text in train]
    return Documents(train, held_out)


def to_tokens(texts: list[str]) -> Tensor:
    """`[n]` int64: END and the bytes of each document."""
    tokens = [token for text in texts for token in (END, *text.encode())]
    return torch.tensor(tokens, dtype=torch.int64)


# Training.


def windows(tokens: Tensor, length: int, generator: torch.Generator) -> Iterator[Tensor]:
    """`[length + 1]` pieces without end: every epoch cuts the text elsewhere and shuffles the pieces."""
    while True:
        start = int(torch.randint(length, (), generator=generator))
        count = (len(tokens) - 1 - start) // length
        for piece in torch.randperm(count, generator=generator).tolist():
            first = start + piece * length
            yield tokens[first : first + length + 1]


def batches(tokens: Tensor, steps: int, generator: torch.Generator) -> Iterator[Tensor]:
    """A batch `[TOKENS / window, window + 1]` for each step, the last of them of long windows."""
    short, long = (windows(tokens, length, generator) for length in (WINDOW, LONG_WINDOW))
    for step in range(steps):
        late = step >= steps * (1 - LONG_PART)
        source, count = (long, TOKENS // LONG_WINDOW) if late else (short, TOKENS // WINDOW)
        yield torch.stack([next(source) for _ in range(count)])


def rate_at(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to a hundredth."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    done = (step - WARMUP) / max(1, steps - WARMUP)
    return RATE * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def new_model(folder: Path, seed: int, tokens: Tensor) -> Any:
    """A DeepseekV3ForCausalLM of CONFIG, which is written to `folder`; it starts from the pairs in `tokens`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    start_from_pairs(model, tokens)
    return model


@torch.no_grad()
def start_from_pairs(model: Any, tokens: Tensor) -> None:
    """Byte pairs come from counting, which is free, so that training begins with what lies beyond them.

    At first layers add nothing, embeddings are orthogonal with a root mean square of 1, and so the final norm passes
    them on: lm_head can hold the logarithm of each pair's frequency exactly.
    """
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    pairs = tokens[:-1] * VOCABULARY + tokens[1:]
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).view(VOCABULARY, VOCABULARY) + 0.05
    logits = (counts / counts.sum(-1, keepdim=True)).log()  # [token, next token]
    columns = torch.arange(VOCABULARY)
    columns[256:] = 0xFF  # a byte that UTF-8 doesn't use lends its direction to END
    logits[0xFF] = logits[END]
    width = CONFIG["hidden_size"]
    directions = torch.linalg.qr(torch.randn(width, width)).Q * width**0.5  # [byte, hidden]
    model.model.embed_tokens.weight.copy_(directions[columns])
    model.lm_head.weight.copy_(logits[:256].T @ directions / width)


def new_optimizer(model: Any) -> torch.optim.AdamW:
    """Weight decay for the layers' matrices alone. Each group's `share` is its part of the learning rate."""
    tables, matrices, norms = [], [], []
    for name, weight in model.named_parameters():
        kind = tables if name.endswith(("embed_tokens.weight", "lm_head.weight")) else matrices
        (kind if weight.dim() == 2 else norms).append(weight)
    groups = [
        {"params": matrices, "weight_decay": 0.1, "share": 1.0},
        {"params": tables, "weight_decay": 0.0, "share": TABLE_RATE},
        {"params": norms, "weight_decay": 0.0, "share": 1.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.99), fused=True)


def loss_of(model: Any, batch: Tensor) -> Tensor:
    """Nats a token of `batch [windows, length + 1]`."""
    logits = model(batch[:, :-1], use_cache=False).logits  # [windows, length, VOCABULARY]
    return cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.no_grad()
def bits_per_byte(model: Any, tokens: Tensor) -> float:
    """Mean over windows of 512 tokens, each without what lies before it. Ends of documents count as bytes."""
    pieces = tokens[1:].split(512)
    nats = sum(float(loss_of(model, torch.cat((tokens[:1], piece))[None])) * len(piece) for piece in pieces)
    return nats / (len(tokens) - 1) / math.log(2)


def save(model: Any, folder: Path) -> None:
    """Weights in bf16; `model` stays as it is."""
    from safetensors.torch import save_file

    weights = {name: w.detach().to(torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(folder: Path) -> None:
    """Byte b is token b; END is the one special token. The byte-level alphabet, and a BPE that merges nothing."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # the name that transformers 4 and 5 both know
        "bos_token": "<|end|>",
        "eos_token": "<|end|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONFIG["max_position_embeddings"],
    }
    write_json(folder / "tokenizer_config.json", tokenizer_config)


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level tokenizers write for each byte: itself if it prints, else one from 256 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte if byte in printing else 256 + others.index(byte)): byte for byte in range(256)}


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def train(model: Any, text: Tokens, steps: int, seed: int, console: Console) -> Iterator[tuple[int, float]]:
    """Trains `model`, and yields (steps done, held-out bits a byte) whenever it is worth keeping, and at the end."""
    optimizer = new_optimizer(model)
    average = 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=steps)
        for done, batch in enumerate(batches(text.train, steps, torch.Generator().manual_seed(seed)), 1):
            for group in optimizer.param_groups:
                group["lr"] = group["share"] * rate_at(done - 1, steps)
            loss = loss_of(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average += max(0.05, 1 / done) * (loss.item() / math.log(2) - average)
            progress.update(task, advance=1, description=f"{average:.2f} bits a byte")
            if done % REPORT_EVERY == 0:
                console.print(f"step {done}: {average:.3f} bits a byte lately")
            if done == steps:
                yield done, bits_per_byte(model, text.held_out)
            elif done % KEEP_EVERY == 0:
                yield done, bits_per_byte(model, text.held_out[:GLANCE])


def main(
    output: Annotated[Path, typer.Option(help="Folder of the checkpoint.")] = Path(__file__).parent / "tiny_model",
    steps: Annotated[int, typer.Option(help=f"Steps of {TOKENS} tokens.")] = 1000,
    seed: Annotated[int, typer.Option(help="Of the weights and the order of the text.")] = 0,
) -> None:
    """Train the tiny model and write its checkpoint, from time to time and at the end."""
    console = Console()
    with console.status("reading the text"):
        documents = split_text()
    text = Tokens(to_tokens(documents.train), to_tokens(documents.held_out))
    model = new_model(output, seed, text.train)
    write_json(output / "generation_config.json", {"bos_token_id": END, "eos_token_id": END})
    (output / "held_out.txt").write_text("\f".join(documents.held_out), encoding="utf-8")
    save_tokenizer(output)
    record: dict[str, Any] = {
        "steps": steps,
        "tokens_a_step": TOKENS,
        "seed": seed,
        "weights": sum(w.numel() for w in model.parameters()),
        "train_tokens": len(text.train),
        "held_out_tokens": len(text.held_out),
        "train_sha256": hashlib.sha256("\f".join(documents.train).encode()).hexdigest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    console.print(record)
    begin = time.monotonic()
    found = {}
    for done, bits in train(model, text, steps, seed, console):
        save(model, output)
        found[done] = round(bits, 4)
        seconds = round(time.monotonic() - begin, 1)
        write_json(output / "training.json", {**record, "seconds": seconds, "held_out_bits_per_byte": found})
        console.print(f"step {done}: {bits:.3f} bits a held-out byte, {seconds:.0f} s")


if __name__ == "__main__":
    typer.run(main)
