"""Stage 7: plan -> the sequence of global batches. Pure numpy.

It is a pure function of (plan, seed, epoch, step), also where every epoch draws its own samples; the number of ranks only
decides how a global batch is cut (`allocation`). Shapes: M kept samples, B global batch, S = ceil(M / B) steps an epoch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .plan import Plan


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step.

    Attributes:
        rows: int64 [B_s], rows of the plan.
        weights: float64 [B_s], plan weights; those of a stratum that is in every batch of the epoch times
            B_s n_c / (M b_c), so that it counts the same in each. Others would lose what they lack in the batches without
            them. Over an epoch every stratum's weights sum to n_c times the plan's.
        denominator: D of this step under the schedule's normalization.
    """

    rows: np.ndarray
    weights: np.ndarray
    denominator: float


def epoch_order(strata: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """One epoch's order of M samples, every stratum spread evenly.

    In a batch of B its count lies within 1.5 + K n_c / M of B n_c / M, for K strata: its own keys are off by half a place,
    and those of all K together move a batch's borders by K / 2 places.

    The j-th sample of a stratum of n_c, shuffled by (seed, epoch, stratum), gets the key (j + .5) / n_c; one sort by
    (key, stratum). One stratum gives a plain shuffle, equal ones round robin, unequal ones proportional shares.

    Args:
        strata: int [M].

    Returns:
        int64 [M], a permutation.
    """
    keys = np.empty(len(strata))
    for stratum in np.unique(strata):
        members = np.flatnonzero(strata == stratum)
        shuffled = members[np.random.default_rng((seed, epoch, int(stratum))).permutation(len(members))]
        keys[shuffled] = (np.arange(len(members)) + 0.5) / len(members)
    return np.lexsort((strata, keys))


class Schedule:
    """All global batches of a run.

    Args:
        plan: the kept samples, their strata, weights and lengths.
        global_batch_size: B.
        epochs: passes over the kept samples.
        seed: of the orders.
        normalization: "sample_mean" (D = B_s) or "token_mean" (D = sum of w_i T_i over the global batch).

    Raises:
        ValueError: if B is smaller than the number of strata, or than the kept samples allow.
    """

    def __init__(
        self, plan: Plan, *, global_batch_size: int, epochs: int = 1, seed: int = 0, normalization: str = "sample_mean"
    ):
        if normalization not in ("sample_mean", "token_mean"):
            raise ValueError(f"normalization {normalization!r}: sample_mean or token_mean")
        self.plan = plan
        self.rows = np.flatnonzero(plan.kept)  # [M], of the first epoch
        self.global_batch_size, self.epochs, self.seed, self.normalization = global_batch_size, epochs, seed, normalization
        self._names, self._counts = np.unique(plan.stratum[self.rows], return_counts=True)
        num_strata = len(self._counts)
        if global_batch_size < num_strata:
            raise ValueError(
                f"global_batch_size {global_batch_size} is smaller than the {num_strata} clusters, so a batch cannot hold "
                "one sample of each: raise train.global_batch_size or lower selection.num_clusters"
            )
        if len(self.rows) < global_batch_size:
            raise ValueError(
                f"kept {len(self.rows)} samples, fewer than global_batch_size {global_batch_size}: lower "
                "train.global_batch_size or raise selection.ratio"
            )
        self.steps_per_epoch = -(-len(self.rows) // global_batch_size)
        self.filler = int(self.rows[plan.num_tokens[self.rows].argmin()])
        self._epoch, self._ordered, self._strata, self._everywhere = -1, self.rows, self.rows, self.rows

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.steps_per_epoch * self.epochs

    def batch(self, step: int) -> GlobalBatch:
        """The global batch of a step, counted from 0 over all epochs."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if self._epoch != epoch:
            rows = np.flatnonzero(self.plan.kept_in(epoch))
            strata = np.searchsorted(self._names, self.plan.stratum[rows])
            order = epoch_order(strata, self.seed, epoch)
            self._epoch, self._ordered, self._strata = epoch, rows[order], strata[order]
            places = np.arange(len(rows)) // self.global_batch_size * len(self._names) + self._strata
            occurs = np.bincount(places, minlength=self.steps_per_epoch * len(self._names)) > 0
            self._everywhere = np.logical_and.reduce(occurs.reshape(self.steps_per_epoch, -1))
        size = self.global_batch_size
        chosen = slice(step_in_epoch * size, (step_in_epoch + 1) * size)
        rows, strata = self._ordered[chosen], self._strata[chosen]
        in_batch = np.bincount(strata, minlength=len(self._counts))
        weights = self.plan.weight[rows].copy()
        corrected = len(rows) * self._counts[strata] / (len(self.rows) * in_batch[strata])
        weights *= np.where(self._everywhere[strata], corrected, 1.0)
        tokens = self.plan.num_supervised_tokens[rows]
        denominator = float(len(rows)) if self.normalization == "sample_mean" else float(weights @ tokens)
        return GlobalBatch(rows, weights, denominator)
