"""Training against a bare loop, packing against padding, balance against clusters: python benchmarks/train.py

  loop      our loader, engine, record and log against a bare DeepSpeed loop with the same loss on the same batches, in
            alternating blocks of 10 steps of one process on one engine, so that both meet the same machine
  packing   useful tokens a second, forward and backward, of the quickstart's model on its rows: padded in random order,
            padded with like lengths together, packed
  balance   the slowest of four ranks over their mean, predicted from lengths and measured, under `cluster` and `tokens`
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from common import alternate, claim, median_ratio, show, write  # isort: skip

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM

import cluster_ds
from cluster_ds.embedded import resolve_data, resolve_model
from cluster_ds.engine import ClusterEngine
from cluster_ds.loader import ClusterLoader
from cluster_ds.loss import supervised_positions, weighted_terms
from cluster_ds.models import load_tokenizer
from cluster_ds.plan import Plan
from cluster_ds.records import Source, read_records
from cluster_ds.run_log import RunLog
from cluster_ds.shapes import quadratic_cost
from cluster_ds.templates import get_template
from cluster_ds.tokens import IGNORE_INDEX, tokenize_sample

BLOCK = 10  # steps
BATCH, MICRO, MAX_TOKENS = 16, 8, 512
SKEW_STEPS, SKEW_PASSES = 20, 6  # a rank's seconds for a step are the least of its passes: cores are shared
PACKS = 4  # of a micro-batch: about as many tokens as eight padded samples make


def samples_of(model: Path, data: str, max_length: int) -> list[dict]:
    """The rows of an embedded data set as its recipe tokenises them."""
    tokenizer = load_tokenizer(model)
    template = get_template("chat", tokenizer)
    records, _ = read_records({"data": Source(path=resolve_data(data))}, 0.01)
    samples = []
    for record in records:
        made = tokenize_sample(record, template, tokenizer, max_length)
        ids = np.array(made.ids)
        samples.append({"id": record.id, "input_ids": ids, "labels": np.where(made.supervised, ids, IGNORE_INDEX)})
    return [sample for sample in samples if (sample["labels"][1:] != IGNORE_INDEX).any()]


def plan_of(samples: list[dict], num_clusters: int) -> Plan:
    """All rows, in clusters by length: the imbalance that clusters of proxies show, at its clearest."""
    n = len(samples)
    lengths = np.array([len(s["input_ids"]) for s in samples])
    clusters = np.argsort(np.argsort(-lengths, kind="stable"), kind="stable") * num_clusters // n
    return Plan(
        ids=[s["id"] for s in samples], cluster=clusters.astype(np.int32), stratum=clusters.astype(np.int32),
        distance=np.zeros(n), weight=np.linspace(0.5, 1.5, n), kept=np.ones(n, dtype=bool), num_tokens=lengths,
        num_supervised_tokens=np.array([int((s["labels"][1:] != IGNORE_INDEX).sum()) for s in samples]),
        loss=np.full(n, np.nan, dtype=np.float32),
    )


def training(
    model: Path, samples: list[dict], dtype: torch.dtype, size: int = BATCH, num_clusters: int = 4, **how: object
) -> tuple[ClusterEngine, ClusterLoader]:
    config: dict = {"train_batch_size": size, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0,
                    "zero_allow_untested_optimizer": True, "communication_data_type": "fp32"}
    if "packing" not in how:
        config["train_micro_batch_size_per_gpu"] = MICRO
    if dtype == torch.bfloat16:
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    engine, _, loader, _ = cluster_ds.initialize(
        model=network.train(), config=config, dataset=samples, plan=plan_of(samples, num_clusters), epochs=1000,
        optimizer=torch.optim.AdamW(network.parameters(), lr=1e-5), quadratic_cost=quadratic_cost(model), **how,
    )
    return engine, loader


def against_a_bare_loop(model: Path, samples: list[dict], blocks: int) -> dict:
    """Seconds of blocks of ours and of the bare loop, on the same batches, one after the other."""
    engine, loader = training(model, samples, torch.float32)
    bare = engine.engine
    batches = iter(loader)
    following = [next(batches) for _ in range(BLOCK * BATCH // MICRO)]
    folder = Path(tempfile.mkdtemp())
    log = RunLog(folder, 0, engine.schedule)

    def ours(recorded: list[dict]) -> None:
        """What training does: the loader makes each batch."""
        started, step = time.perf_counter(), recorded[0]["step"]
        loader.load_state_dict({"step": step})
        for _, batch in zip(recorded, loader, strict=False):
            lr = engine.lr
            engine.backward(engine(batch))
            if engine.step():
                log.write(step, engine.last_record, lr, engine.grad_norm, time.perf_counter() - started, 0.0)
                step += 1

    def plain(recorded: list[dict]) -> None:
        """What anyone would write around DeepSpeed, with the same loss; the batches are there already."""
        for batch in recorded:
            bare.set_gradient_accumulation_boundary(batch["is_last"])
            lines, predictors, targets = supervised_positions(batch["labels"])
            assert engine.head is not None
            with engine.head.asked(batch["input_ids"].shape, lines, predictors, targets):
                losses = bare(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False).logits
            sums = torch.zeros(len(batch["labels"])).index_add(0, lines, losses)
            counts = torch.bincount(lines, minlength=len(sums))
            loss = weighted_terms(sums, counts, batch["sample_weight"], "sample_mean").sum() / batch["denominator"]
            bare.backward(loss, scale_wrt_gas=False)
            bare.step()

    pairs = []
    for block in range(blocks + 1):
        seconds = {}
        for name, work in ((("ours", ours), ("bare", plain)) if block % 2 else (("bare", plain), ("ours", ours))):
            started = time.perf_counter()
            work(following)
            seconds[name] = time.perf_counter() - started
        if block:
            pairs.append((seconds["ours"], seconds["bare"]))
        loader.load_state_dict({"step": following[-1]["step"] + 1})
        batches = iter(loader)
        following = [next(batches) for _ in following]
    log.close()
    shutil.rmtree(folder)
    ratios = np.array([a / b for a, b in pairs])
    drawn = np.median(np.random.default_rng(0).choice(ratios, (10_000, len(ratios))), axis=1)
    return {"pairs": pairs, "median": float(np.median(ratios)), "interval": np.quantile(drawn, [0.025, 0.975]).tolist()}


def padding_and_packing(model: Path, samples: list[dict], rounds: int) -> dict:
    """Useful tokens a second of the same 48 rows."""
    rows = np.random.default_rng(1).permutation(len(samples))[:48]
    chosen = [samples[i] for i in rows]
    packing = cluster_ds.Packing(MAX_TOKENS, PACKS * MAX_TOKENS)
    ways = {"padded, random order": {"allocation": "cluster"}, "padded, like lengths": {"allocation": "tokens"},
            "packed": {"packing": packing, "allocation": "tokens"}}
    tokens = sum(len(s["input_ids"]) for s in chosen)
    engines = {name: training(model, chosen, torch.bfloat16, 48, 1, **how) for name, how in ways.items()}
    batches = {}
    for name, (_, loader) in engines.items():
        found = iter(loader)
        batches[name] = [next(found)]
        while not batches[name][-1]["is_last"]:
            batches[name].append(next(found))

    def work(name: str) -> None:
        engine = engines[name][0]
        for batch in batches[name]:
            engine.backward(engine(batch))
        engine.engine.optimizer.zero_grad()

    times = alternate({name: (lambda name=name: work(name)) for name in ways}, rounds)
    for name, entry in times.items():
        computed = sum(batch["input_ids"].numel() for batch in batches[name])
        entry |= {"useful": tokens / computed, "tokens_per_s": tokens / entry["median_s"]}
        entry["micro_batches"] = len(batches[name])
    return times


def balance(rank: int, world: int, port: int, model: str, samples: list[dict], out: str) -> None:
    """On one of four ranks: skew, predicted and measured, of some steps under both allocations."""
    _join(rank, world, port)
    torch.set_num_threads(1)
    found = {}
    for allocation in ("cluster", "tokens"):
        engine, loader = training(
            Path(model), samples, torch.float32, packing=cluster_ds.Packing(MAX_TOKENS, MICRO * MAX_TOKENS),
            allocation=allocation,
        )
        predicted, seconds = [], np.full((SKEW_STEPS, world), np.inf)
        for _ in range(SKEW_PASSES):
            predicted.clear()
            loader.load_state_dict({"step": 0})
            for batch in loader:
                engine.backward(engine(batch))
                if engine.step():
                    step = len(predicted)
                    predicted.append(engine.last_record.predicted_skew)
                    seconds[step] = np.minimum(seconds[step], engine.last_record.rank_seconds)
                if len(predicted) == SKEW_STEPS:
                    break
        measured = seconds.max(axis=1) / seconds.mean(axis=1)
        found[allocation] = [float(np.median(column)) for column in (predicted, measured)]
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


def _join(rank: int, world: int, port: int) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_SIZE=str(world), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port), DS_ACCELERATOR="cpu",
    )
    dist.init_process_group("gloo", rank=rank, world_size=world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=20, help="of 10 steps, of each contestant")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29571, help="on this machine's loopback, for the ranks")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    tiny, small = Path(resolve_model("embedded:tiny")), Path(resolve_model("embedded:smollm2-135m-instruct"))
    rows = samples_of(small, "embedded:python_source", MAX_TOKENS)
    short = samples_of(tiny, "embedded:python_source_small", 320)

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "skew"
        mp.spawn(balance, (4, args.port + 1, str(tiny), short, str(out)), nprocs=4)
        skews = torch.load(out)
    what = f"4 ranks, packed, clusters by length: slowest over mean, median of {SKEW_STEPS} steps, {SKEW_PASSES} passes"
    show(what, ["", "predicted", "measured"], [[name, *values] for name, values in skews.items()])
    held = [
        claim(f"cluster is above 1.2, predicted {skews['cluster'][0]:.3f}, measured {skews['cluster'][1]:.3f}",
              min(skews["cluster"]) > 1.2),
        claim(f"tokens is at most 1.05, predicted {skews['tokens'][0]:.3f}, measured {skews['tokens'][1]:.3f}",
              max(skews["tokens"]) <= 1.05),
    ]

    _join(0, 1, args.port)
    loop = against_a_bare_loop(tiny, short, args.blocks)
    low, high = loop["interval"]
    show(f"{args.blocks} blocks of {BLOCK} steps: seconds of ours over the bare loop's", ["median", "95 % from", "to"],
         [[loop["median"], low, high]])
    held.append(claim(f"the interval of the median ratio ends at 1.02 or less ({low:.4f} to {high:.4f})", high <= 1.02))

    times = padding_and_packing(small, rows, args.rounds)
    show(f"48 of the quickstart's rows, forward and backward, bf16, {torch.get_num_threads()} threads",
         ["", "useful share", "micro-batches", "median s", "useful tokens/s", "over padded"],
         [[name, t["useful"], t["micro_batches"], t["median_s"], t["tokens_per_s"],
           median_ratio(times, "padded, random order", name)] for name, t in times.items()])
    gain = median_ratio(times, "padded, random order", "packed")
    held.append(claim(f"packing: 1.5 x the useful tokens a second of padding in random order ({gain:.2f})", gain >= 1.5))
    write(args.json, {"loop": loop, "packing": times, "skew": skews, "held": all(held)})
    dist.destroy_process_group()
    sys.exit(not all(held))


if __name__ == "__main__":
    main()
