"""An ordinary DeepSpeed loop: deepspeed --num_gpus 2 examples/plain_loop.py. Compare with cluster_loop.py."""

import json
import os
import sys
from pathlib import Path

import deepspeed
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster_ds.embedded import resolve_data, resolve_model

CONFIG = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def load():
    """A small pretrained model and instruction data that need no network."""
    folder = resolve_model("embedded:tiny")
    tokenizer, samples = AutoTokenizer.from_pretrained(folder), []
    for line in Path(resolve_data("embedded:python_source_small")).read_text().splitlines():
        row = json.loads(line)
        prompt, answer = (tokenizer(row[k])["input_ids"][:150] for k in ("instruction", "response"))
        input_ids = np.array([*prompt, *answer, tokenizer.eos_token_id])
        labels = np.where(np.arange(len(input_ids)) < len(prompt), -100, input_ids)
        samples.append({"id": f"row-{len(samples)}", "input_ids": input_ids, "labels": labels})
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer, samples


def collate(samples):
    def pad(key, value):
        rows = [torch.as_tensor(s[key]) for s in samples]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}


def main():
    model, tokenizer, dataset = load()
    deepspeed.init_distributed()
    engine, optimizer, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=CONFIG, training_data=dataset, collate_fn=collate
    )
    for batch in loader:
        loss = engine(**{k: v.to(engine.device) for k, v in batch.items()}).loss
        engine.backward(loss)
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary and int(os.environ["RANK"]) == 0:
            print(f"step {engine.global_steps}: loss {loss.item():.3f} on this rank's last micro-batch", flush=True)


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()  # its threads must not outlive Python
