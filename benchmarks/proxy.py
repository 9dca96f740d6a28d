"""Extraction against a plain forward pass and against what other methods need: python benchmarks/proxy.py.

SmolLM2-135M on 8 x 512 tokens of Python source text, of which the second half is supervised. Contestants on the same rows:
  plain    a forward pass with logits [B, T, V], nothing done with them
  hidden   a forward pass to the hidden states
  ours     gradient proxies with norms, losses and projection of one batch
  shard    the same rows through extraction itself: batches, positions, proxies, projection, a shard on disk with checksum
  IFD      two forward passes: the answer with and without its prompt, through our batches and chunked loss
  LESS     per-sample gradients of LoRA weights (q, k, v, o; rank 16), forward and backward, chunked loss; one of its
           four checkpoints, without Adam's features and the projection that it needs on top
"""

import argparse
import math
import shutil
import sys
import tempfile
from pathlib import Path

from common import alternate, claim, peak_anonymous, show, write  # isort: skip

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from cluster_ds.embedded import resolve_data, resolve_model
from cluster_ds.features import projection_matrix
from cluster_ds.loss import supervised_positions
from cluster_ds.models import load_tokenizer
from cluster_ds.proxy import Room, batch_losses, gradient_proxies, run_shard
from cluster_ds.records import Source, read_records
from cluster_ds.shards import length_batches, padding_share, write_shard
from cluster_ds.templates import get_template
from cluster_ds.tokens import IGNORE_INDEX, tokenize_sample

NUM_ROWS, LENGTH = 8, 512
LORA_RANK = 16


class Lora(torch.nn.Module):
    """A frozen linear layer with a trainable low-rank addition."""

    def __init__(self, base: torch.nn.Linear):
        super().__init__()
        self.base = base
        kind = base.weight.dtype
        self.down = torch.nn.Parameter(torch.randn(LORA_RANK, base.in_features, dtype=kind) / math.sqrt(base.in_features))
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, LORA_RANK, dtype=kind))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Rows(list):
    """Samples in memory, as extraction reads them."""

    @property
    def num_tokens(self) -> np.ndarray:
        return np.array([len(row["input_ids"]) for row in self])

    @property
    def ids(self) -> list[str]:
        return [row["id"] for row in self]


def with_lora(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer.self_attn, name, Lora(getattr(layer.self_attn, name)))
    return [p for p in model.parameters() if p.requires_grad]


def quickstart_tokens(folder: Path) -> tuple[list[list[int]], object]:
    """The quickstart's samples as token ids."""
    tokenizer = load_tokenizer(folder)
    records, _ = read_records({"data": Source(path=resolve_data("embedded:python_source"))}, 0.01)
    template = get_template("chat", tokenizer)
    return [tokenize_sample(record, template, tokenizer, LENGTH).ids for record in records], tokenizer


def measure(dtype: torch.dtype, folder: Path, ids: torch.Tensor, opening: list[int], rounds: int) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    lora_model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    trainable = with_lora(lora_model)
    mask = torch.ones_like(ids)
    labels = ids.clone()
    labels[:, : LENGTH // 2] = IGNORE_INDEX
    answers = torch.cat([torch.tensor(opening).expand(NUM_ROWS, -1), ids[:, LENGTH // 2 :]], dim=1)
    answer_labels = torch.where(torch.arange(answers.shape[1]) < len(opening), IGNORE_INDEX, answers)
    matrix = torch.from_numpy(projection_matrix(model.config.hidden_size))

    @torch.no_grad()
    def plain() -> object:
        return model(input_ids=ids, attention_mask=mask, use_cache=False).logits

    @torch.no_grad()
    def hidden() -> object:
        return model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state

    def scored(tokens: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        positions = supervised_positions(wanted)
        return positions[0], *batch_losses(model, tokens, *positions)

    def ours() -> object:
        features, norms, losses = gradient_proxies(*scored(ids, labels), NUM_ROWS)
        half = features.half()
        return half, (half.float() @ matrix).half(), norms, losses

    def ifd() -> object:
        means = []
        for tokens, wanted in ((ids, labels), (answers, answer_labels)):
            samples, _, losses = scored(tokens, wanted)
            means.append(torch.zeros(NUM_ROWS).index_add(0, samples, losses))
        return means[0] / means[1]

    def less() -> object:
        norms = []
        for row in range(NUM_ROWS):
            states = lora_model.base_model(input_ids=ids[row : row + 1], use_cache=False).last_hidden_state
            samples, predictors, targets = supervised_positions(labels[row : row + 1])
            chosen = states[samples, predictors]
            # The loss's gradient with respect to the hidden states in chunks, then one backward pass below them.
            toward, chunk = torch.empty_like(chosen), 128
            for start in range(0, len(chosen), chunk):
                leaf = chosen[start : start + chunk].detach().requires_grad_()
                logits = F.linear(leaf, lora_model.lm_head.weight).float()
                (F.cross_entropy(logits, targets[start : start + chunk], reduction="sum") / len(chosen)).backward()
                toward[start : start + chunk] = leaf.grad
            gradients = torch.autograd.grad(chosen, trainable, grad_outputs=toward)
            norms.append(sum(float(g.float().square().sum()) for g in gradients))
        return norms

    rows = Rows({"id": f"s{i}", "input_ids": ids[i].numpy(), "labels": labels[i].numpy()} for i in range(NUM_ROWS))
    batches = length_batches(rows.num_tokens, NUM_ROWS * LENGTH)
    scratch = Path(tempfile.mkdtemp())

    def shard() -> object:
        write_shard(scratch, 0, "key", run_shard(model, rows, batches, 0, torch.device("cpu"), Room()), seconds=0.0)
        return scratch

    contestants = {"plain": plain, "hidden": hidden, "ours": ours, "shard": shard, "IFD": ifd, "LESS": less}
    flops = {}
    for name, work in contestants.items():
        counter = FlopCounterMode(display=False)
        with counter:
            work()
        flops[name] = counter.get_total_flops()
    memory = {}
    for name, work in contestants.items():
        with peak_anonymous(0.002) as peak:
            work()
        memory[name] = peak.above
    times = alternate(contestants, rounds)
    shutil.rmtree(scratch)
    return {"times": times, "flops": flops, "peak_bytes_above_model": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = Path(resolve_model("embedded:smollm2-135m-instruct"))
    samples, tokenizer = quickstart_tokens(folder)
    stream = np.concatenate([np.array(sample) for sample in samples])
    ids = torch.from_numpy(stream[: NUM_ROWS * LENGTH].reshape(NUM_ROWS, LENGTH))
    opening = tokenizer("### Response:", add_special_tokens=False)["input_ids"]
    lengths = np.array([len(sample) for sample in samples])
    padding = {budget: padding_share(lengths, length_batches(lengths, budget)) for budget in (2048, 4096, 16384)}
    result: dict = {"padding": padding, "threads": args.threads}
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    held = []
    for name in kinds if args.dtype == "both" else [args.dtype]:
        found = result[name] = measure(kinds[name], folder, ids, opening, args.rounds)
        times, flops, memory = found["times"], found["flops"], found["peak_bytes_above_model"]
        rows: list[list[object]] = [
            [who, t["median_s"], f"{t['least_s']:.2f}-{t['most_s']:.2f}", t["median_s"] / times["ours"]["median_s"],
             flops[who] / flops["ours"], memory[who] / 1e6]
            for who, t in times.items()
        ]
        show(f"{name}, {NUM_ROWS} x {LENGTH} tokens, half supervised, {args.threads} threads, {args.rounds} rounds",
             ["", "median s", "spread", "time / ours", "FLOPs / ours", "peak MB above the model"], rows)
        if name == "fp32":
            share = memory["ours"] / memory["plain"]
            ratio = {who: times[who]["median_s"] / times["ours"]["median_s"] for who in times}
            held += [
                claim(f"ours <= 1.0 x plain ({1 / ratio['plain']:.3f})", ratio["plain"] >= 1),
                claim(f"extraction to disk <= 1.0 x plain ({ratio['shard'] / ratio['plain']:.3f})",
                      ratio["shard"] <= ratio["plain"]),
                claim(f"ours <= 1.25 x hidden ({1 / ratio['hidden']:.3f})", ratio["hidden"] >= 1 / 1.25),
                claim(f"ours' peak memory <= .6 x plain's ({share:.3f})", share <= 0.6),
                claim(f"IFD >= 1.4 x ours ({ratio['IFD']:.3f})", ratio["IFD"] >= 1.4),
                claim(f"LESS >= 2 x ours ({ratio['LESS']:.3f})", ratio["LESS"] >= 2),
            ]
    shares = ", ".join(f"{budget} tokens a batch: {share:.1%}" for budget, share in padding.items())
    held.append(claim(f"padding < 5 % on the quickstart's lengths ({shares})", max(padding.values()) < 0.05))
    result["held"] = all(held)
    write(args.json, result)
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
