"""Stage 11d: a recipe's model, optimizer, schedule and loader under DeepSpeed, at step 0."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from transformers import get_scheduler
from transformers.integrations import HfDeepSpeedConfig

from .distributed import Ranks
from .ds_config import with_batch_arithmetic, zero_stage
from .engine import ClusterEngine
from .estimate import batch_text, skew_text
from .initialization import initialize, join_deepspeed
from .loader import ClusterLoader
from .lora import with_adapters
from .models import compile_layers, load_model, pad_token_id
from .plan import Plan
from .prepare import Prepared
from .recipe import Recipe, TrainSection
from .schedule import Schedule
from .shapes import quadratic_cost


def build_training(
    recipe: Recipe, prepared: Prepared, config: dict[str, Any], ranks: Ranks
) -> tuple[ClusterEngine, ClusterLoader]:  # collective
    """The engine and the loader of a recipe, at step 0."""
    t = recipe.train
    join_deepspeed()
    torch.manual_seed(t.seed)
    dtype = torch.bfloat16 if t.precision in ("bf16", "pure_bf16") else torch.float32
    sharded = zero_stage(config) == 3
    stated = with_batch_arithmetic(config, ranks.world_size, packed=t.packing)
    holder = HfDeepSpeedConfig(stated) if sharded else None  # while it lives, from_pretrained shards as it loads
    base = load_model(prepared.model_folder, recipe.model, dtype, None if sharded else ranks.device)
    model = base if recipe.model.lora is None else with_adapters(base, recipe.model.lora, t.seed)
    del holder
    if t.gradient_checkpointing:
        base.activation_checkpointing_enable({"use_reentrant": False})
    if t.compile:
        compile_layers(base)
    torch.set_float32_matmul_precision("high" if t.tf32 else "highest")
    if t.precision == "bf16_autocast":
        torch.set_autocast_cache_enabled(False)  # the cache would cost 2 more bytes a parameter
    model.train()
    optimizer = make_optimizer(model, t, ranks.device.type == "cuda")

    def scheduler(inner: torch.optim.Optimizer, num_steps: int) -> Any:
        warmup = warmup_steps(t, num_steps)
        name = "constant_with_warmup" if t.schedule == "constant" else t.schedule
        return get_scheduler(name, inner, num_warmup_steps=warmup, num_training_steps=num_steps)

    engine, _, loader, _ = initialize(
        model=model, config=config, dataset=prepared.tokens, plan=prepared.plan, epochs=t.epochs, seed=t.seed,
        normalization=t.normalization, allocation=t.allocation, packing=recipe.packing,
        quadratic_cost=quadratic_cost(prepared.model_folder), optimizer=optimizer, lr_scheduler=scheduler,
        pad_id=pad_token_id(prepared.tokenizer), num_workers=t.num_workers,
    )
    ranks.print(
        f"[train] {batch_text(recipe, ranks.world_size)}; {engine.schedule.steps_per_epoch} steps an epoch, "
        f"{engine.schedule.num_steps} in all; ZeRO {zero_stage(config)}, {t.precision}, {t.optimizer}"
    )
    if ranks.is_main and ranks.world_size > 1:
        attention = loader.batches.allocator.quadratic_cost
        ranks.print(f"[train] {skew_text(prepared.plan, recipe, ranks.world_size, attention)}")
    return engine, loader


def make_optimizer(model: torch.nn.Module, train: TrainSection, on_gpu: bool) -> torch.optim.Optimizer:
    """AdamW, or Adafactor as Hugging Face's Trainer sets it; vectors (norms, biases) are not decayed."""
    named = [(p, getattr(p, "ds_shape", p.shape)) for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p, shape in named if len(shape) >= 2], "weight_decay": train.weight_decay},
        {"params": [p for p, shape in named if len(shape) < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if train.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=train.lr, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.betas[0], train.betas[1]), eps=train.eps, fused=on_gpu)


def warmup_steps(train: TrainSection, num_steps: int) -> int:
    """Warm-up in optimizer steps."""
    if train.warmup_ratio is not None:
        return math.ceil(train.warmup_ratio * num_steps)
    return train.warmup_steps or 0


def schedule_of(recipe: Recipe, plan: Plan) -> Schedule:
    """All global batches of a recipe's run."""
    t = recipe.train
    return Schedule(
        plan, global_batch_size=t.global_batch_size, epochs=t.epochs, seed=t.seed, normalization=t.normalization
    )


def run_step(engine: ClusterEngine, batches: Iterator[dict[str, Any]]) -> None:  # collective
    """One optimizer step on the next micro-batches."""
    while True:
        engine.backward(engine(next(batches)))
        if engine.step():
            return
