"""Stage 11: DeepSpeed's engine with the weighted loss, by composition; `initialization` builds it. Shapes: K clusters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist

from .loss import LossHead, logits_cross_entropy, supervised_positions, weighted_terms
from .loss_check import in_eval_mode, require_right_losses
from .schedule import Schedule

LossFn = Callable[[Any, dict[str, Any]], torch.Tensor]
_VOTES, _PASSES, _FILLERS, _SECONDS = 5, 6, 7, 8  # places among a step's sums; ranks' seconds, then clusters' sums
_NOT_FOR_MODEL = (
    "labels", "sample", "sample_weight", "is_filler", "row", "cluster", "denominator", "predicted_skew", "step",
    "micro_step", "is_last",
)


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
        losses: unweighted mean token loss of each of them.
        num_stop_votes: ranks that had `stop_vote` set when the step ended.
        num_micro_steps: forward passes of each rank.
        num_fillers: copies with weight 0 that all ranks computed to stay in step.
        predicted_skew: cost of the dearest rank's micro-batches over the mean of all ranks'.
        rank_seconds: of each rank's forward passes; at ZeRO stage 3 they wait for each other in them.
    """

    loss: float
    weight_sum: float
    num_samples: int
    num_supervised_tokens: int
    num_tokens: int
    cluster_loss: list[float]
    cluster_samples: list[int]
    rows: list[int]
    losses: list[float]
    num_stop_votes: int
    num_micro_steps: int
    num_fillers: int
    predicted_skew: float
    rank_seconds: list[float]

    @property
    def skew(self) -> float:
        """Forward seconds of the slowest rank over the mean of all ranks'."""
        return max(self.rank_seconds) * len(self.rank_seconds) / max(sum(self.rank_seconds), 1e-12)


class ClusterEngine:
    """A DeepSpeed engine that takes the loader's micro-batches and knows the loss's scale.

    `engine` is DeepSpeed's own. Gradients only flow through `backward`: `loss.backward()` is refused, because DeepSpeed
    would divide by the accumulation steps once more. A rank that wants to stop sets `stop_vote`; the next step's record
    tells every rank, at no cost.
    """

    def __init__(
        self, engine: Any, schedule: Schedule, loss_fn: LossFn | None = None, head: LossHead | None = None
    ):
        self.engine, self.schedule, self.loss_fn, self.head = engine, schedule, loss_fn, head
        self.dp_world_size, self.dp_rank = dist.get_world_size(), dist.get_rank()
        self._inputs = None if loss_fn is None else set(signature(engine.module.forward).parameters)
        self._num_clusters = schedule.plan.num_clusters
        self._in_backward, self._checked = False, head is None
        self._sums = self._fresh_sums()
        self._seen: list[torch.Tensor] = []  # float64 [2, n]: rows and their losses
        self._clocks: list[Any] = []
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None
        self._bare_norm: torch.Tensor | None = None
        self._denominator, self._predicted_skew, self._is_last = 1.0, 1.0, False
        self.stop_vote = False

    def __call__(self, batch: dict[str, Any]) -> torch.Tensor:
        """Run the model on a micro-batch.

        Returns:
            W x weighted numerator / D, a scalar whose mean over ranks, summed over micro-batches, is the step's loss.
        Raises:
            ValueError: on the first, if the model's losses are not what its output embeddings make of its hidden states, or
                if packed samples see each other.
        """
        device = self.engine.device
        names = set(batch) - set(_NOT_FOR_MODEL) if self._inputs is None else set(batch) & self._inputs
        inputs = {k: v.to(device, non_blocking=True) for k, v in batch.items() if k in names}
        weights, filler = (batch[k].to(device, non_blocking=True) for k in ("sample_weight", "is_filler"))
        if not self._checked:
            self._checked = True
            require_right_losses(self.engine, self._losses_at, inputs, packed="sample" in batch)  # collective at stage 3
        self._denominator, self._predicted_skew = batch["denominator"], batch["predicted_skew"]
        self._is_last = batch["is_last"]
        self.engine.set_gradient_accumulation_boundary(self._is_last)
        self._clock()
        if self.loss_fn is None:
            sums, counts = self._sample_losses(inputs, batch)
        else:
            sums, counts = self._own_losses(self.engine(**inputs), batch)
        self._clock()
        terms = weighted_terms(sums, counts, weights, self.schedule.normalization)
        loss = self.dp_world_size * terms.sum() / batch["denominator"]
        self._add(terms.detach(), (sums / counts.clamp(min=1)).detach(), counts, weights, ~filler, batch)
        loss.register_hook(self._refuse_foreign_backward)
        return loss

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """The module as evaluation wants it, without gradients; frozen parts that were not in training mode stay so."""
        with in_eval_mode(self.engine), torch.no_grad():
            yield

    def sample_losses(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:  # collective at stage 3
        """Summed cross entropy [n] of a padded batch of a causal language model, and supervised tokens [n]."""
        inputs = {k: v.to(self.engine.device, non_blocking=True) for k, v in batch.items() if k != "labels"}
        return self._sample_losses(inputs, {**batch, "row": batch["labels"][:, 0]})

    def _sample_losses(self, inputs: dict[str, torch.Tensor], batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Summed cross entropy of each sample float [n], and the number of its supervised tokens int64 [n]."""
        device, num_samples = self.engine.device, len(batch["row"])
        lines, predictors, targets = supervised_positions(batch["labels"])  # on the host: a GPU would be waited for
        samples = batch["sample"][lines, predictors] if "sample" in batch else lines
        counts = torch.bincount(samples, minlength=num_samples)
        losses = self._losses_at(inputs, lines, predictors, targets)
        sums = torch.zeros(num_samples, dtype=losses.dtype, device=device)
        return sums.index_add(0, samples.to(device, non_blocking=True), losses), counts.to(device, non_blocking=True)

    def _losses_at(
        self, inputs: dict[str, torch.Tensor], lines: torch.Tensor, predictors: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        lines, predictors, targets = (t.to(self.engine.device, non_blocking=True) for t in (lines, predictors, targets))
        if self.head is not None:
            with self.head.asked(inputs["input_ids"].shape, lines, predictors, targets):
                return self.engine(**inputs, use_cache=False).logits
        return logits_cross_entropy(self.engine(**inputs, use_cache=False).logits, lines, predictors, targets)

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
        if self._is_last and self.engine.optimizer is self.engine.basic_optimizer:  # DeepSpeed keeps no norm of a bare one
            gradients = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
            self._bare_norm = torch.nn.utils.get_total_norm(gradients)
        self.engine.step()
        if self._is_last:
            self._sums[_VOTES] = float(self.stop_vote)
            self._sums[_SECONDS + self.dp_rank] = self._forward_seconds()
            dist.all_reduce(self._sums)  # collective
            seen = torch.cat(self._seen, dim=1)
            mine = seen.new_full((2, self.schedule.global_batch_size), -1)
            mine[:, : seen.shape[1]] = seen
            every = [torch.empty_like(mine) for _ in range(self.dp_world_size)]
            dist.all_gather(every, mine)  # collective
            self._last, self._sums, self._seen = (self._sums, torch.cat(every, dim=1)), self._fresh_sums(), []
        return self._is_last

    @property
    def last_loss(self) -> float:
        """The global loss of the last optimizer step."""
        return self.last_record.loss

    @property
    def last_record(self) -> StepRecord:
        """Global sums of the last optimizer step."""
        if self._last is None:
            raise ValueError("no optimizer step yet")
        sums, seen = self._last
        rows, losses = seen[:, seen[0] >= 0].cpu()
        order = rows.argsort()
        numerator, weight_sum, samples, supervised, tokens, votes, passes, fillers, *rest = sums.tolist()
        seconds, clusters = rest[: self.dp_world_size], rest[self.dp_world_size :]
        totals, counts = clusters[: self._num_clusters], clusters[self._num_clusters :]
        return StepRecord(
            loss=numerator / self._denominator, weight_sum=weight_sum, num_samples=int(samples),
            num_supervised_tokens=int(supervised), num_tokens=int(tokens),
            cluster_loss=[s / n if n else float("nan") for s, n in zip(totals, counts, strict=True)],
            cluster_samples=[int(n) for n in counts], rows=rows[order].long().tolist(),
            losses=losses[order].tolist(),
            num_stop_votes=int(votes), num_micro_steps=int(passes) // self.dp_world_size, num_fillers=int(fillers),
            predicted_skew=self._predicted_skew, rank_seconds=seconds,
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
        tokens = torch.from_numpy(self.schedule.plan.num_tokens[batch["row"].numpy()]).to(keep.device, non_blocking=True)
        columns = torch.stack([terms.double(), weights, torch.ones_like(keep), counts.double(), tokens.double()])
        self._sums[:_VOTES] += columns @ keep
        self._sums[_PASSES] += 1
        self._sums[_FILLERS] += int(batch["is_filler"].sum())
        own = (~batch["is_filler"]).nonzero()[:, 0]  # on the host: a GPU would be waited for
        rows = batch["row"][own].to(keep.device, non_blocking=True).double()
        self._seen.append(torch.stack([rows, means.double()[own.to(keep.device, non_blocking=True)]]))
        clusters = batch["cluster"].to(keep.device, non_blocking=True)
        first = _SECONDS + self.dp_world_size
        self._sums.index_add_(0, first + clusters, means.double() * keep)
        self._sums.index_add_(0, first + self._num_clusters + clusters, keep)

    def _fresh_sums(self) -> torch.Tensor:
        size = _SECONDS + self.dp_world_size + 2 * self._num_clusters
        return torch.zeros(size, dtype=torch.float64, device=self.engine.device)

    def _clock(self) -> None:
        """Note the time, on a GPU that at which it gets here."""
        if self.engine.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._clocks.append(event)
        else:
            self._clocks.append(time.process_time())  # ranks may share cores

    def _forward_seconds(self) -> float:
        clocks, self._clocks = self._clocks, []
        pairs = zip(clocks[::2], clocks[1::2], strict=True)
        if self.engine.device.type != "cuda":
            return sum(end - begin for begin, end in pairs)
        clocks[-1].synchronize()  # the step behind it is under way
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1000

    def _refuse_foreign_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self._in_backward:
            raise RuntimeError("call engine.backward(loss), not loss.backward(): DeepSpeed would scale the gradient again")
        return gradient
