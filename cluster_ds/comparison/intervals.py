"""How far two arms' held-out losses differ, when every arm was trained with the same seeds and judged on the same examples.

The difference d_{s,e} of an arm and the reference has a part that goes with the seed, one that goes with the example, and
a rest: two crossed random effects. The variance of its mean is estimated without bias by

    V = V_seed + V_example - V_rest,   V_seed = var_s(mean_e d) / S,  V_example = var_e(mean_s d) / E,

V_rest being the rest's share, which both hold; it is taken as no less than the larger of the two. The interval is
Student's with Satterthwaite's degrees of freedom. One seed alone says nothing of other seeds, so its interval holds for
that seed's runs only. Shapes: S seeds, E examples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

_CONFIDENCE, _POWER = 0.95, 0.8


@dataclass(frozen=True)
class Difference:
    """Of an arm's mean loss from the reference's.

    Attributes:
        mean, low, high: the difference and its 95 % interval.
        detectable: a true difference as large would put zero outside of the interval with a probability of 80 %.
        num_seeds, num_examples: that were paired.
    """

    mean: float
    low: float
    high: float
    detectable: float
    num_seeds: int
    num_examples: int

    @property
    def verdict(self) -> str:
        """What the numbers allow to say: nothing below the detectable difference, which is stricter than the interval."""
        if abs(self.mean) < self.detectable or self.low <= 0 <= self.high:
            return "no difference seen"
        return "lower" if self.mean < 0 else "higher"


def paired_difference(arm: np.ndarray, reference: np.ndarray) -> Difference:
    """Compare losses float [S, E] of an arm with those of the reference.

    Raises:
        ValueError: for shapes that are not the same, or fewer than two examples.
    """
    if arm.shape != reference.shape or arm.shape[1] < 2:
        raise ValueError(f"losses of shapes {arm.shape} and {reference.shape} [seeds, examples] cannot be paired")
    d = arm - reference
    num_seeds, num_examples = d.shape
    by_seed, by_example, mean = d.mean(axis=1), d.mean(axis=0), float(d.mean())
    of_examples = float(by_example.var(ddof=1)) / num_examples
    variance, freedom = of_examples, float(num_examples - 1)
    if num_seeds > 1:
        of_seeds = float(by_seed.var(ddof=1)) / num_seeds
        rest = d - by_seed[:, None] - by_example[None, :] + mean
        of_rest = float((rest**2).sum()) / ((num_seeds - 1) * (num_examples - 1)) / d.size
        variance = max(of_seeds + of_examples - of_rest, of_seeds, of_examples)
        parts = of_seeds**2 / (num_seeds - 1) + of_examples**2 / (num_examples - 1)
        freedom = max(1.0, (of_seeds + of_examples) ** 2 / parts) if parts > 0 else freedom
    error = float(np.sqrt(variance))
    half = float(stats.t.ppf((1 + _CONFIDENCE) / 2, freedom)) * error
    detectable = half + float(stats.t.ppf(_POWER, freedom)) * error
    return Difference(mean, mean - half, mean + half, detectable, num_seeds, num_examples)
