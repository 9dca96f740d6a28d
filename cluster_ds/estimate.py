"""Before a run: what memory each GPU needs, and how long an epoch would take. Pure arithmetic.

Memory is an estimate from the sizes of tensors, checked against DeepSpeed's table of states (tests/test_estimate.py);
activations and the reserve are rules of thumb. Shapes: B samples of a micro-batch, T tokens, H hidden, I intermediate, V
vocabulary, L layers, P parameters, W ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .allocation import Allocator, Packing, accumulation_steps
from .ds_config import zero_stage
from .plan import Plan, random_part, unselected
from .recipe import ModelSection, Recipe, TrainSection
from .schedule import Schedule
from .shapes import CHUNK_ELEMENTS, ModelShape

_RESERVE_BYTES = 2.5e9  # CUDA context, NCCL's buffers, fragmentation; a rule of thumb
_DEFAULT_BUCKET = 5e8  # DeepSpeed's elements of a reduce bucket
_SKEW_STEPS = 20
_OVERLAP_FACTOR = 4.5  # buckets in flight at stage 2 with overlap_comm, DeepSpeed's own rule


def memory_per_gpu(
    shape: ModelShape, train: TrainSection, config: dict[str, Any], world_size: int, max_length: int,
    model: ModelSection | None = None, packing: Packing | None = None,
) -> dict[str, float]:
    """Bytes of each component on one GPU in training; "on the host" is not on the GPU.

    Args:
        shape: of the model.
        train: the recipe's section.
        config: as resolved for DeepSpeed.
        world_size: W.
        max_length: T of the longest sample.
        model: the recipe's section; attention "eager" holds B x heads x T x T scores, adapters alone have gradients.
        packing: of samples into lines, which then are B.
    """
    zero = config.get("zero_optimization", {})
    stage, p = zero_stage(config), float(shape.num_parameters)
    lora = model.lora if model is not None else None
    trained = p if lora is None else float(shape.adapter_parameters(lora))
    size = 2 if train.precision in ("bf16", "pure_bf16") else 4
    parts = world_size if stage >= 1 else 1
    masters = trained * 4 if (size == 2 and train.precision == "bf16") or stage >= 1 else 0.0
    moments = trained * 8 if train.optimizer == "adamw" and train.precision != "pure_bf16" else 0.0
    if train.precision == "pure_bf16":
        moments = trained * 4 if train.optimizer == "adamw" else 0.0
    if train.optimizer == "adafactor":
        moments = (shape.factored_parameters if lora is None else trained) * 4.0
    copy = trained * 4 if stage == 0 and train.precision == "bf16" else 0.0  # fp32 gradients of the step
    fp32_accumulation = config.get("data_types", {}).get("grad_accum_dtype") == "fp32" and size == 2
    share = {1: 4.0, 2: 2 / world_size, 3: 2 / world_size}.get(stage, 0.0)
    extra = trained * share if fp32_accumulation else 0.0
    states = (masters + moments) / parts
    offloaded = zero.get("offload_optimizer", {}).get("device") == "cpu"
    gradients = trained * size / (world_size if stage >= 2 else 1) + copy
    on_host = 0.0
    if offloaded:  # DeepSpeed keeps the gradients' partition where the optimizer is
        on_host, states, gradients, extra = states + gradients + extra, 0.0, 0.0, 0.0
    lines, length = train.micro_batch_size, max_length
    if packing is not None:
        lines, length = packing.packs_per_micro_batch, packing.max_tokens
    tokens = lines * length
    activation = 4 if train.precision in ("fp32", "bf16_autocast") else 2  # the residual stream
    block = tokens * (2 * (10 * shape.hidden_size + 4 * shape.intermediate_size) + 8 * shape.hidden_size)
    if train.precision == "fp32":
        block *= 2
    if model is not None and model.attn_implementation == "eager":
        block += 6 * lines * shape.num_heads * length**2
    blocks = 1 if train.gradient_checkpointing else shape.num_layers
    needed: dict[str, float] = {
        "parameters": (p + (trained if lora is not None else 0.0)) * size / (world_size if stage == 3 else 1),
        "autocast copies": 2.0 * shape.layer_parameters if train.precision == "bf16_autocast" else 0.0,
        "gradients": gradients,
        "fp32 accumulation": extra,
        "optimizer": states,
        "buckets": _buckets(zero, stage, size) if world_size > 1 or stage > 0 else 0.0,
        "activations": tokens * shape.hidden_size * activation * shape.num_layers + blocks * block,
        "loss": _loss_bytes(tokens, shape, train.precision != "fp32"),
        "reserve": _RESERVE_BYTES,
    }
    if offloaded:
        needed["on the host"] = on_host
    return needed


def total_bytes(needed: dict[str, float]) -> float:
    """On the GPU."""
    return sum(value for name, value in needed.items() if name != "on the host")


def _loss_bytes(tokens: int, shape: ModelShape, half: bool) -> float:
    """A chunk of logits with its softmax, and the head's gradient, which is summed in fp32."""
    chunk = min(tokens * shape.vocab_size, CHUNK_ELEMENTS["cuda"])
    return 12.0 * chunk + (8.0 if half else 4.0) * shape.vocab_size * shape.hidden_size


def _buckets(zero: dict[str, Any], stage: int, size: int) -> float:
    """Communication buffers; gradients are reduced in fp32."""
    reduce = 4 * float(zero.get("reduce_bucket_size", _DEFAULT_BUCKET))
    if stage == 0:
        return 4 * _DEFAULT_BUCKET
    if stage == 3:
        live = size * float(zero.get("stage3_max_live_parameters", 1e9))
        return reduce + live + size * float(zero.get("stage3_prefetch_bucket_size", 5e7))
    if zero.get("overlap_comm"):
        return _OVERLAP_FACTOR * reduce
    return reduce + size * float(zero.get("allgather_bucket_size", _DEFAULT_BUCKET))


def arms_of(plan: Plan, seed: int) -> dict[str, Plan]:
    """Full data, a random part as large as the selection, and the selection itself."""
    usable = plan.cluster >= 0
    random = random_part(plan, int(plan.kept.sum()), seed, redraw=plan.redraw_seed is not None)
    return {"full": unselected(plan, usable), "random": random, "CluSTER": plan}


def loads_of_arms(plan: Plan, recipe: Recipe, world_size: int, quadratic_cost: float) -> dict[str, np.ndarray]:
    """What the slowest rank of each step computes, float64 [steps], for each of `arms_of`.

    The selection is dealt to the ranks as the recipe says; full data and the random part by tokens, as whoever has no
    clusters to place would deal them: a saving is claimed against the best that they can do.
    """
    by_tokens = recipe.model_copy(update={"train": recipe.train.model_copy(update={"allocation": "tokens"})})
    return {
        name: loads_of_steps(arm, recipe if arm is plan else by_tokens, world_size, quadratic_cost).max(axis=1)
        for name, arm in arms_of(plan, recipe.train.seed).items()
    }


def loads_of_steps(
    plan: Plan, recipe: Recipe, world_size: int, quadratic_cost: float, num_steps: int | None = None
) -> np.ndarray:
    """What each rank computes in each step, in tokens of a short sample: float64 [steps, W], see `Allocator.loads`.

    Args:
        plan: of the arm.
        recipe: how it would be trained.
        world_size: W.
        quadratic_cost: of the model, see `shapes.quadratic_cost`.
        num_steps: the first steps alone.
    """
    train = recipe.train
    schedule = Schedule(
        plan, global_batch_size=train.global_batch_size, epochs=train.epochs, seed=train.seed,
        normalization=train.normalization,
    )
    allocator = Allocator(world_size, train.allocation, train.micro_batch_size, recipe.packing, quadratic_cost)
    steps = range(schedule.num_steps if num_steps is None else min(num_steps, schedule.num_steps))
    return np.array([allocator.loads(plan, allocator.cut(schedule, schedule.batch(step))) for step in steps])


def skew_text(plan: Plan, recipe: Recipe, world_size: int, quadratic_cost: float) -> str:
    """What the allocation costs, from the lengths of the first steps: the time that ranks wait for the slowest."""
    found = {}
    for allocation in {recipe.train.allocation, "tokens"}:
        train = recipe.train.model_copy(update={"allocation": allocation})
        changed = recipe.model_copy(update={"train": train})
        loads = loads_of_steps(plan, changed, world_size, quadratic_cost, _SKEW_STEPS)
        found[allocation] = float((loads.max(axis=1) / loads.mean(axis=1)).mean())
    mine = recipe.train.allocation
    other = "" if mine == "tokens" else f"; allocation tokens would make it {found['tokens']:.2f}, with the same gradients"
    return f"allocation {mine}: the slowest rank computes {found[mine]:.2f} x the mean{other}"


def steps_text(num_samples: int, train: TrainSection) -> str:
    """Steps of an epoch in words, the short last one told apart."""
    size = train.global_batch_size
    full, rest = divmod(num_samples, size)
    steps = full + (rest > 0)
    detail = f" ({full} full, one of {rest})" if rest and full else ""
    return f"{steps} steps an epoch{detail}, {steps * train.epochs} in all"


def batch_text(recipe: Recipe, world_size: int) -> str:
    """The batch arithmetic of W ranks."""
    train, packing = recipe.train, recipe.packing
    if packing is not None:
        return (
            f"{world_size} ranks share {train.global_batch_size} samples a step, in micro-batches of at most "
            f"{packing.packs_per_micro_batch} packs of {packing.max_tokens} tokens"
        )
    accumulation = accumulation_steps(train.global_batch_size, train.micro_batch_size, world_size)
    return (
        f"{world_size} ranks x {train.micro_batch_size} samples x {accumulation} micro-batches = "
        f"{train.global_batch_size} a step"
    )
