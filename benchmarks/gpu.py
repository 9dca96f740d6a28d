"""Extraction and packed training on one GPU: python benchmarks/gpu.py --json FILE [--tests TESTS.xml] [--tiny]

A Llama-2-7B-shaped model with random weights in bf16, with as many layers as the GPU's memory holds by our own estimate;
random tokens with the long-tailed lengths of instruction data. MFU is by model FLOPs (cluster_ds/throughput.py). With --tiny
a small model on whatever there is: that shows that the script works, and measures nothing.
"""

import argparse
import json
import os
import subprocess
import time
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path

from common import ROOT, machine, show  # isort: skip

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import cluster_ds
from cluster_ds.building import make_optimizer
from cluster_ds.distributed import free_port, on_gpu
from cluster_ds.ds_config import resolve_config
from cluster_ds.estimate import memory_per_gpu, total_bytes
from cluster_ds.models import attention_of
from cluster_ds.plan import Plan
from cluster_ds.proxy import Room, gradient_proxies, run_batches
from cluster_ds.recipe import ModelSection, TrainSection
from cluster_ds.shapes import SHAPES, ModelShape
from cluster_ds.shards import length_batches
from cluster_ds.throughput import peak_flops, step_flops

FORMAT = 1
ATTENTION = ModelSection(name_or_path="random weights", attn_implementation="flash_attention_2")
SEVEN, TINY = SHAPES["meta-llama/Llama-2-7b-hf"], ModelShape(2, 64, 128, 4, 4, 512)
SHARE_OF_MEMORY = 0.9
PACKS = {False: (4096, 4), True: (256, 2)}  # tokens of a pack, packs of a micro-batch
BATCH, STEPS, WARM_UP = 128, 6, 2


class Samples(list):
    """Random tokens; the first third of each sample is its prompt."""

    def __init__(self, number: int, vocab_size: int, longest: int):
        rng = np.random.default_rng(0)
        for i in range(number):
            length = int(np.clip(rng.lognormal(np.log(longest / 12), 0.8), 16, longest))
            ids = rng.integers(3, vocab_size, length)
            labels = np.where(np.arange(length) < length // 3, -100, ids)
            self.append({"id": f"s{i:05d}", "input_ids": ids, "labels": labels})

    @property
    def num_tokens(self) -> np.ndarray:
        return np.array([len(s["input_ids"]) for s in self])

    @property
    def num_supervised(self) -> np.ndarray:
        return np.array([int((s["labels"][1:] != -100).sum()) for s in self])

    @property
    def ids(self) -> list[str]:
        return [s["id"] for s in self]


def model_of(shape: ModelShape, device: torch.device) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers, num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
        max_position_embeddings=4096, attn_implementation=attention_of(ATTENTION), use_cache=False,
    )
    torch.manual_seed(0)
    kind = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(kind)


def layers_that_fit(
    shape: ModelShape, train: TrainSection, config: dict, packing: cluster_ds.Packing, room: float
) -> ModelShape:
    """The shape with the most layers whose training fits by our estimate."""
    for number in range(shape.num_layers, 0, -1):
        smaller = replace(shape, num_layers=number)
        if total_bytes(memory_per_gpu(smaller, train, config, 1, packing.max_tokens, ATTENTION, packing)) <= room:
            return smaller
    raise SystemExit(f"not even one layer fits into {room / 1e9:.0f} GB")


def wait() -> float:
    """The time when the device has done what it was given."""
    if on_gpu():
        torch.cuda.synchronize()
    return time.perf_counter()


def extraction(
    model: LlamaForCausalLM, shape: ModelShape, samples: Samples, device: torch.device, peak: float | None
) -> dict:
    """Seconds of gradient proxies over all samples but a first batch."""
    batches = length_batches(samples.num_tokens, 16384)
    model.eval()
    begun = 0.0
    for number, _ in enumerate(run_batches(model, samples, batches, 0, device, Room(), gradient_proxies)):
        if number == 0:
            begun = wait()
    seconds = wait() - begun
    counted = np.concatenate(batches[1:]) if len(batches) > 1 else batches[0]
    lengths, supervised = samples.num_tokens[counted], int(samples.num_supervised[counted].sum())
    flops = step_flops(shape, lengths, supervised) / 3  # the forward pass alone
    return {
        "samples": len(counted), "tokens": int(lengths.sum()), "seconds": seconds,
        "tokens_per_s": float(lengths.sum() / seconds), "mfu": None if peak is None else flops / seconds / peak,
    }


def training(
    model: LlamaForCausalLM, shape: ModelShape, samples: Samples, train: TrainSection, config: dict,
    packing: cluster_ds.Packing, peak: float | None,
) -> dict:
    """Seconds of optimizer steps, from the loader to the record."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    n = len(samples)
    plan = Plan(
        ids=samples.ids, cluster=np.zeros(n, np.int32), stratum=np.zeros(n, np.int32), distance=np.zeros(n),
        weight=np.ones(n), kept=np.ones(n, bool), num_tokens=samples.num_tokens,
        num_supervised_tokens=samples.num_supervised, loss=np.full(n, np.nan, np.float32),
    )
    engine, _, loader, _ = cluster_ds.initialize(
        model=model.train(), config=config, dataset=samples, plan=plan, epochs=1, allocation="tokens", packing=packing,
        quadratic_cost=shape.hidden_size / shape.layer_parameters, optimizer=make_optimizer(model, train, on_gpu()),
        num_workers=2,
    )
    seconds, tokens, flops, losses, micro = [], [], [], [], []
    started = wait()
    for batch in loader:
        engine.backward(engine(batch))
        if not engine.step():
            continue
        record = engine.last_record
        losses.append(record.loss)
        lengths = samples.num_tokens[record.rows]
        now = wait()
        seconds.append(now - started)
        tokens.append(record.num_tokens)
        flops.append(step_flops(shape, lengths, record.num_supervised_tokens))
        micro.append(record.num_micro_steps)
        started = now
        if len(seconds) == WARM_UP + STEPS:
            break
    total = sum(seconds[WARM_UP:])
    return {
        "steps": len(seconds) - WARM_UP, "seconds_per_step": seconds[WARM_UP:], "micro_steps": micro[WARM_UP:],
        "useful_tokens_per_s": sum(tokens[WARM_UP:]) / total, "losses": losses,
        "mfu": None if peak is None else sum(flops[WARM_UP:]) / total / peak,
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu() else None,
        "estimated_bytes": total_bytes(memory_per_gpu(shape, train, config, 1, packing.max_tokens, ATTENTION, packing)),
    }


def read_tests(path: Path | None) -> dict | None:
    """Names and outcomes of the GPU-marked tests, from pytest's own report; None without one."""
    if path is None or not path.is_file():
        return None
    out: dict[str, list[str]] = {"passed": [], "failed": [], "skipped": []}
    for case in xml.etree.ElementTree.parse(path).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        out[outcome].append(f"{(case.get('classname') or '').replace('.', '/')}.py::{case.get('name')}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--tests", type=Path, help="pytest's junit file of the GPU-marked tests")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if not on_gpu() and not args.tiny:
        raise SystemExit("there is no GPU here: --tiny shows that the script works")
    started = time.perf_counter()
    tests = read_tests(args.tests)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_SIZE="1", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())
    device = torch.device("cuda", 0) if on_gpu() else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu() else "gloo")
    name = torch.cuda.get_device_name() if on_gpu() else "CPU"
    peak = peak_flops(name)

    max_tokens, packs = PACKS[args.tiny]
    packing = cluster_ds.Packing(max_tokens, packs * max_tokens)
    train = TrainSection(
        epochs=1, global_batch_size=BATCH, micro_batch_size=packs, packing=True, max_tokens=max_tokens, lr=1e-6,
        precision="bf16",
    )
    config = resolve_config("zero2", train, 1)
    room = SHARE_OF_MEMORY * torch.cuda.mem_get_info()[0] if on_gpu() else 8e9
    shape = layers_that_fit(TINY if args.tiny else SEVEN, train, config, packing, room)
    samples = Samples(BATCH * (STEPS + WARM_UP), shape.vocab_size, max_tokens)
    model = model_of(shape, device)
    result = {
        "format": FORMAT, "tiny": args.tiny, "device": name, "peak_flops": peak, "attention": attention_of(ATTENTION),
        "versions": {module.__name__: module.__version__ for module in (torch, deepspeed, transformers)},
        "commit": subprocess.run(
            ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "model": {"layers": shape.num_layers, "of_layers": (TINY if args.tiny else SEVEN).num_layers,
                  "parameters": shape.num_parameters, "max_tokens": max_tokens, "packs_per_micro_batch": packs},
        "tests": tests, "machine": machine(), "extraction": None, "training": None,
    }

    def keep() -> None:
        """What there is so far: GPU time is dear."""
        result["seconds"] = time.perf_counter() - started
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")

    keep()
    result["extraction"] = extraction(model, shape, samples, device, peak)
    keep()
    result["training"] = training(model, shape, samples, train, config, packing, peak)
    keep()
    dist.destroy_process_group()
    ex, tr = result["extraction"], result["training"]
    layers = f"{shape.num_layers} of {result['model']['of_layers']} layers"
    show(
        f"{name}, {layers}, {shape.num_parameters / 1e9:.2f}e9 parameters, bf16, {result['attention']}",
        ["", "useful tokens/s", "MFU"],
        [["extraction", ex["tokens_per_s"], ex["mfu"]], ["training, packed", tr["useful_tokens_per_s"], tr["mfu"]]],
    )
    if tr["peak_bytes"]:
        estimated = f"estimated {tr['estimated_bytes'] / 1e9:.1f} GB with its reserve"
        print(f"memory: {tr['peak_bytes'] / 1e9:.1f} GB at most, {estimated}")
    print(", ".join(f"{len(names)} GPU tests {outcome}" for outcome, names in (tests or {}).items()) or "no tests were run")
    print(f"{result['seconds']:.0f} s in all; written to {args.json}")
    raise SystemExit(1 if tests is None or tests["failed"] else 0)


if __name__ == "__main__":
    main()
