"""plain_loop.py turned into a CluSTER loop: deepspeed --num_gpus 2 examples/cluster_loop.py.

New are the proxies, the plan, and cluster_ds.initialize in place of deepspeed.initialize; the loop's three calls stay.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cluster_ds
from cluster_ds.loss import supervised_positions
from cluster_ds.proxy import batch_losses, gradient_proxies
from cluster_ds.tokens import pad_batch
from examples.plain_loop import CONFIG, load


def proxies(model, samples):
    """One forward pass: a unit vector for every sample. Real data deserve more than one process: launch/preprocess.py."""
    rows = []
    for start in range(0, len(samples), 16):
        batch = {k: torch.from_numpy(v) for k, v in pad_batch(samples[start : start + 16], pad_id=0).items()}
        positions = supervised_positions(batch["labels"])
        hidden, losses = batch_losses(model, batch["input_ids"], *positions)
        rows.append(gradient_proxies(positions[0], hidden, losses, len(batch["labels"]))[0].numpy())
    return np.concatenate(rows)


def main():
    model, tokenizer, dataset = load()
    torch.set_num_threads(1)  # the same sums, and so the same plan, on every rank
    plan = cluster_ds.make_plan(
        proxies(model.eval(), dataset), [s["id"] for s in dataset], [len(s["input_ids"]) for s in dataset],
        num_supervised_tokens=[int((s["labels"][1:] != -100).sum()) for s in dataset], num_clusters=4, min_fraction=0.3,
    )
    engine, optimizer, loader, _ = cluster_ds.initialize(
        model=model.train(), config=CONFIG, dataset=dataset, plan=plan, pad_id=tokenizer.pad_token_id
    )
    if int(os.environ["RANK"]) == 0:
        print(*plan.lines(), sep="\n")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        if engine.step() and int(os.environ["RANK"]) == 0:
            print(f"step {engine.engine.global_steps}: loss {engine.last_loss:.3f} over the global batch", flush=True)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # its threads must not outlive Python
