"""Stage 10: DeepSpeed's engine with the weighted loss, by composition.

    engine, optimizer, loader, scheduler = initialize(model=model, config=ds_config, dataset=dataset, plan=plan)
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

No `training_data` and no subclass: the loader is ours, DeepSpeed sees micro-batches. Shapes: K clusters.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from .distributed import assert_ranks_agree, build_cpu_communication, forget_shared_buffers, on_gpu
from .ds_config import with_batch_arithmetic, zero_stage
from .loader import ClusterLoader, Collate, stack
from .loss import sample_losses, weighted_terms
from .plan import Plan
from .schedule import Schedule

LossFn = Callable[[Any, dict[str, Any]], torch.Tensor]
_VOTES = 5  # place of the votes among a step's sums; the clusters' sums follow
_NOT_FOR_MODEL = ("labels", "sample_weight", "is_filler", "row", "cluster", "denominator", "step", "micro_step")


@dataclass(frozen=True)
class StepRecord:
    """Sums over the global batch of one optimizer step; fillers are in none of them.

    Attributes:
        loss: numerator / D, the value that was minimised.
        weight_sum: sum of the sample weights.
        num_samples, num_supervised_tokens, num_tokens: counts.
        cluster_loss: mean of the unweighted sample losses per cluster, NaN where a cluster has none.
        cluster_samples: samples per cluster.
        rows: the plan's rows that were trained on, sorted.
        num_stop_votes: ranks that had `stop_vote` set when the step ended.
    """

    loss: float
    weight_sum: float
    num_samples: int
    num_supervised_tokens: int
    num_tokens: int
    cluster_loss: list[float]
    cluster_samples: list[int]
    rows: list[int]
    num_stop_votes: int = 0


class ClusterEngine:
    """A DeepSpeed engine that takes the loader's micro-batches and knows the loss's scale.

    `engine` is DeepSpeed's own. Gradients only flow through `backward`: `loss.backward()` is refused, because DeepSpeed
    would divide by the accumulation steps once more. A rank that wants to stop sets `stop_vote`; the next step's record
    tells every rank, at no cost.
    """

    def __init__(self, engine: Any, schedule: Schedule, loss_fn: LossFn | None = None):
        self.engine, self.schedule, self.loss_fn = engine, schedule, loss_fn
        self.dp_world_size = dist.get_world_size()
        self._inputs = None if loss_fn is None else set(signature(engine.module.forward).parameters)
        self._num_clusters = schedule.plan.num_clusters
        self._in_backward = False
        self._sums = self._fresh_sums()
        self._rows: list[torch.Tensor] = []
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self._bare_norm: torch.Tensor | None = None
        self._denominator = 1.0
        self.stop_vote = False

    def __call__(self, batch: dict[str, Any]) -> torch.Tensor:
        """Run the model on a micro-batch.

        Returns:
            W x weighted numerator / D, a scalar whose mean over ranks, summed over micro-batches, is the step's loss.
        """
        device = self.engine.device
        names = set(batch) - set(_NOT_FOR_MODEL) if self._inputs is None else set(batch) & self._inputs
        inputs = {k: v.to(device, non_blocking=True) for k, v in batch.items() if k in names}
        weights, filler = (batch[k].to(device) for k in ("sample_weight", "is_filler"))
        if self.loss_fn is None:
            logits = self.engine(**inputs, use_cache=False).logits
            sums, counts = sample_losses(logits, batch["labels"].to(device))
        else:
            sums, counts = self._own_losses(self.engine(**inputs), batch)
        terms = weighted_terms(sums, counts, weights, self.schedule.normalization)
        loss = self.dp_world_size * terms.sum() / batch["denominator"]
        self._denominator = batch["denominator"]
        self._add(terms.detach(), (sums / counts.clamp(min=1)).detach(), counts, weights, ~filler, batch)
        loss.register_hook(self._refuse_foreign_backward)
        return loss

    def _own_losses(self, outputs: Any, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """`loss_fn`'s mean loss of each sample as sums over its supervised tokens, with their counts from the plan."""
        assert self.loss_fn is not None
        device = self.engine.device
        on_device = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
        means = self.loss_fn(outputs, on_device)
        if means.shape != batch["sample_weight"].shape:
            raise ValueError(
                f"loss_fn gave a loss of shape {list(means.shape)} for {len(batch['sample_weight'])} samples: it must give "
                "one loss a sample (reduction='none', then the mean over each sample's own elements)"
            )
        counts = torch.from_numpy(self.schedule.plan.num_supervised_tokens[batch["row"].numpy()]).to(device)
        return means.float() * counts, counts

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagate a loss that `__call__` returned."""
        self._in_backward = True
        try:
            self.engine.backward(loss, scale_wrt_gas=False)
        finally:
            self._in_backward = False

    def step(self) -> bool:
        """DeepSpeed's step.

        Returns:
            whether an optimizer step was due; its sums are then ready in `last_record`.
        """
        boundary = self.engine.is_gradient_accumulation_boundary()
        if boundary and self.engine.optimizer is self.engine.basic_optimizer:  # DeepSpeed keeps no norm for a bare optimizer
            gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            self._bare_norm = torch.nn.utils.get_total_norm(gradients)
        self.engine.step()
        if boundary:
            self._sums[_VOTES] = float(self.stop_vote)
            dist.all_reduce(self._sums)  # collective
            mine = torch.cat(self._rows)
            rows = [torch.empty_like(mine) for _ in range(self.dp_world_size)]
            dist.all_gather(rows, mine)  # collective
            self._last, self._sums, self._rows = (self._sums, torch.cat(rows)), self._fresh_sums(), []
        return boundary

    @property
    def last_loss(self) -> float:
        """The global loss of the last optimizer step."""
        return self.last_record.loss

    @property
    def last_record(self) -> StepRecord:
        """Global sums of the last optimizer step."""
        if self._last is None:
            raise ValueError("no optimizer step yet")
        sums, rows = self._last
        numerator, weight_sum, samples, supervised, tokens, votes, *clusters = sums.tolist()
        losses, counts = clusters[: self._num_clusters], clusters[self._num_clusters :]
        return StepRecord(
            loss=numerator / self._denominator, weight_sum=weight_sum, num_samples=int(samples),
            num_supervised_tokens=int(supervised), num_tokens=int(tokens),
            cluster_loss=[s / n if n else float("nan") for s, n in zip(losses, counts, strict=True)],
            cluster_samples=[int(n) for n in counts], rows=sorted(rows[rows >= 0].tolist()),
            num_stop_votes=int(votes),
        )

    @property
    def grad_norm(self) -> float | None:
        """l2 norm of the last step's gradient before clipping."""
        norm = self._bare_norm if self._bare_norm is not None else self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    @property
    def step_applied(self) -> bool:
        """False when DeepSpeed left the last optimizer step out because a gradient was not finite."""
        return bool(self.engine.was_step_applied())

    @property
    def lr(self) -> float:
        """Learning rate that the next step will use."""
        return float(self.engine.get_lr()[0])

    def _add(
        self, terms: torch.Tensor, means: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor, real: torch.Tensor,
        batch: dict[str, Any],
    ) -> None:
        keep = real.double()
        tokens = batch["attention_mask"].to(keep.device).sum(dim=1) if "attention_mask" in batch else counts
        columns = torch.stack([terms.double(), weights, torch.ones_like(keep), counts.double(), tokens.double()])
        self._sums[:_VOTES] += columns @ keep
        self._rows.append(torch.where(real, batch["row"].to(keep.device), -1))
        clusters = batch["cluster"].to(keep.device)
        first = _VOTES + 1
        self._sums.index_add_(0, first + clusters, means.double() * keep)
        self._sums.index_add_(0, first + self._num_clusters + clusters, keep)

    def _fresh_sums(self) -> torch.Tensor:
        return torch.zeros(_VOTES + 1 + 2 * self._num_clusters, dtype=torch.float64, device=self.engine.device)

    def _refuse_foreign_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self._in_backward:
            raise RuntimeError("call engine.backward(loss), not loss.backward(): DeepSpeed would scale the gradient again")
        return gradient


def join_deepspeed() -> None:  # collective
    """DeepSpeed's communication on the process group that is there, or on a new one; zero.Init needs it before the model."""
    build_cpu_communication()
    deepspeed.init_distributed(verbose=False)
    if on_gpu():  # DeepSpeed would do so only inside initialize(), after our first collective
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        forget_shared_buffers()


def initialize(
    *, model: torch.nn.Module, config: dict[str, Any], dataset: Any, plan: Plan, epochs: int = 1, seed: int = 0,
    normalization: str = "sample_mean", allocation: str = "cluster", optimizer: torch.optim.Optimizer | None = None,
    lr_scheduler: Callable[[torch.optim.Optimizer, int], Any] | None = None, loss_fn: LossFn | None = None,
    collate: Collate | None = None, pad_id: int = 0, num_workers: int = 0,
) -> tuple[ClusterEngine, Any, ClusterLoader, Any]:
    """`deepspeed.initialize` for a plan.

    Args:
        model: a causal language model whose outputs have `.logits`; with `loss_fn` any module.
        config: DeepSpeed's config with train_batch_size (the global batch) and train_micro_batch_size_per_gpu;
            gradient_accumulation_steps is derived.
        dataset: dataset[i] -> {"input_ids", "labels"[, "id"]} belongs to plan.ids[i]; checked when it is read. With
            `loss_fn` any dictionary.
        plan: what to train on.
        epochs: passes over the kept samples.
        seed: of the order.
        normalization: "sample_mean" or "token_mean", see `loss`.
        allocation: "cluster" or "tokens", see `schedule.rank_batch`.
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
    config = with_batch_arithmetic(config, world_size)
    schedule = Schedule(
        plan, global_batch_size=config["train_batch_size"], epochs=epochs, seed=seed, normalization=normalization
    )
    loader = ClusterLoader(
        dataset, schedule, dp_rank=dist.get_rank(), dp_world_size=world_size,
        micro_batch_size=config["train_micro_batch_size_per_gpu"], allocation=allocation,
        collate=collate or (stack if loss_fn is not None else None), pad_id=pad_id, num_workers=num_workers,
        pin_memory=on_gpu(), count_labels=loss_fn is None,
    )
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu() else torch.device("cpu")
    facts: dict[str, int | str] = {
        "plan": plan.hash, "steps": schedule.num_steps, "micro-batches": len(loader), "seed": seed,
        "global_batch_size": schedule.global_batch_size,
    }
    assert_ranks_agree(facts, device)  # collective
    scheduler = None if lr_scheduler is None else lambda inner: lr_scheduler(inner, schedule.num_steps)
    engine, optimizer, _, scheduler = deepspeed.initialize(
        model=model, model_parameters=[p for p in model.parameters() if p.requires_grad], optimizer=optimizer,
        lr_scheduler=scheduler, config=config,
    )
    if zero_stage(config) == 0 and config.get("bf16", {}).get("enabled"):
        _undo_phantom_step(engine)
    return ClusterEngine(engine, schedule, loss_fn), optimizer, loader, scheduler


def _undo_phantom_step(engine: Any) -> None:
    """Stage 0 with bf16 takes an optimizer step with zero gradients inside initialize(): start from the weights again."""
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.basic_optimizer.state.clear()
        engine.optimizer.refresh_fp32_params()


