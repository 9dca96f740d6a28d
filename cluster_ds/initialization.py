"""Stage 11, its entry: a model, a plan and DeepSpeed's config become an engine and its loader.

    engine, optimizer, loader, scheduler = initialize(model=model, config=ds_config, dataset=dataset, plan=plan)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

No `training_data` and no subclass: the loader is ours, DeepSpeed sees micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import blake2b
from inspect import signature
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist

from .allocation import Allocation, Allocator, Packing
from .distributed import assert_ranks_agree, build_cpu_communication, forget_shared_buffers, on_gpu
from .ds_config import with_batch_arithmetic, zero_stage
from .engine import ClusterEngine, LossFn
from .loader import ClusterLoader, Collate, pack, pad, stack
from .lora import base_of
from .loss import LossHead
from .messages import unless_it_fails
from .plan import Plan
from .schedule import Schedule


def join_deepspeed() -> None:  # collective
    """DeepSpeed's communication on the process group that is there, or on a new one; zero.Init needs it before the model."""
    build_cpu_communication()
    with unless_it_fails():  # every rank says that an op is built
        deepspeed.init_distributed(verbose=False)
    if on_gpu():  # DeepSpeed would do so only inside initialize(), after our first collective
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        forget_shared_buffers()


def initialize(
    *, model: torch.nn.Module, config: dict[str, Any], dataset: Any, plan: Plan, epochs: int = 1, seed: int = 0,
    normalization: str = "sample_mean", allocation: Allocation = "cluster", packing: Packing | None = None,
    quadratic_cost: float = 0.0, optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Callable[[torch.optim.Optimizer, int], Any] | None = None, loss_fn: LossFn | None = None,
    collate: Collate | None = None, pad_id: int = 0, num_workers: int = 0,
) -> tuple[ClusterEngine, Any, ClusterLoader, Any]:
    """`deepspeed.initialize` for a plan.

    Args:
        model: a causal language model whose outputs have `.logits`; with `loss_fn` any module.
        config: DeepSpeed's config with train_batch_size (the global batch) and, without packing,
            train_micro_batch_size_per_gpu; gradient_accumulation_steps is derived.
        dataset: dataset[i] -> {"input_ids", "labels"[, "id"]} belongs to plan.ids[i]; checked when it is read. With
            `loss_fn` any dictionary.
        plan: what to train on.
        epochs: passes over the kept samples.
        seed: of the order.
        normalization: "sample_mean" or "token_mean", see `loss`.
        allocation, packing, quadratic_cost: see `allocation.Allocator`.
        optimizer: a client optimizer; otherwise the config's.
        lr_scheduler: called with the optimizer and the number of steps; DeepSpeed steps the result.
        loss_fn: (model's outputs, batch) -> float [B], the mean loss of each sample, for models that are no Hugging Face
            causal language models. The model is called with those of the batch's entries that its forward names.
        collate, pad_id, num_workers: of the loader; with `loss_fn` and no `collate` samples are stacked as they are.
    Returns:
        engine, optimizer, loader, scheduler (None without one).
    Raises:
        ValueError: for batch sizes that do not divide, too few samples, or ranks that disagree about the plan.
    """
    join_deepspeed()
    world_size = dist.get_world_size()
    if packing is not None:
        _require_packable(model, plan, packing, own=loss_fn is not None or collate is not None)
    head = _loss_head(model) if loss_fn is None else None
    global_batch_size = config.get("train_batch_size", 0)
    config = with_batch_arithmetic(config, world_size, packed=packing is not None)
    schedule = Schedule(plan, global_batch_size=global_batch_size, epochs=epochs, seed=seed, normalization=normalization)
    allocator = Allocator(world_size, allocation, config["train_micro_batch_size_per_gpu"], packing, quadratic_cost)
    if packing is not None:
        collate = pack(pad_id, flat="flash" in str(getattr(model.config, "_attn_implementation", "")))
    elif collate is None:
        collate = pad(pad_id) if loss_fn is None else stack
    loader = ClusterLoader(
        dataset, schedule, allocator, dp_rank=dist.get_rank(), collate=collate, num_workers=num_workers,
        pin_memory=on_gpu(), count_labels=loss_fn is None,
    )
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")
    facts: dict[str, int | str] = {
        "plan": plan.hash, "steps": schedule.num_steps, "seed": seed, "global_batch_size": schedule.global_batch_size,
        "micro_batch_size": allocator.micro_batch_size, "max_tokens": packing.max_tokens if packing else 0,
        "tokens_per_micro_batch": packing.tokens_per_micro_batch if packing else 0,
        "allocation or the model's shape": blake2b(repr((allocation, quadratic_cost)).encode()).hexdigest(),
    }
    assert_ranks_agree(facts, device)  # collective
    scheduler = None if lr_scheduler is None else lambda inner: lr_scheduler(inner, schedule.num_steps)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], optimizer=optimizer,
        lr_scheduler=scheduler, config=config,
    )
    if zero_stage(config) == 0 and config.get("bf16", {}).get("enabled"):
        _undo_phantom_step(engine)
    return ClusterEngine(engine, schedule, loss_fn, head), optimizer, loader, scheduler


def _require_packable(model: torch.nn.Module, plan: Plan, packing: Packing, own: bool) -> None:
    """Refuse what could not be packed, before anything is built.

    Raises:
        ValueError: for other than Hugging Face causal language models that know positions, or samples longer than a pack.
    """
    name = type(model).__name__
    if own:
        raise ValueError("packing needs a Hugging Face causal language model, and neither loss_fn nor collate")
    if _output_layer(model) is None:
        raise ValueError(f"packing: {name} has no torch.nn.Linear as output embeddings, from which losses are computed")
    if "position_ids" not in signature(base_of(model).forward).parameters:
        raise ValueError(f"packing: {name} takes no position_ids, so it cannot tell the samples of a pack apart")
    usable = np.flatnonzero(plan.cluster >= 0 if plan.redraw_seed is not None else plan.kept)
    longest = int(usable[plan.num_tokens[usable].argmax()])
    if plan.num_tokens[longest] > packing.max_tokens:
        raise ValueError(
            f"sample {plan.ids[longest]} has {plan.num_tokens[longest]} tokens, more than a pack of {packing.max_tokens}: "
            "raise max_tokens, or lower data.max_length"
        )


def _loss_head(model: torch.nn.Module) -> LossHead | None:
    """Over the output embeddings of a Hugging Face model; None for others, whose outputs have `.logits`."""
    layer = _output_layer(model)
    return None if layer is None else LossHead(layer)


def _output_layer(model: torch.nn.Module) -> torch.nn.Linear | None:
    find = getattr(model, "get_output_embeddings", None)
    layer = find() if callable(find) else None
    return layer if isinstance(layer, torch.nn.Linear) else None


def _undo_phantom_step(engine: Any) -> None:
    """Stage 0 with bf16 takes an optimizer step with zero gradients inside initialize(): start from the weights again."""
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.basic_optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()
