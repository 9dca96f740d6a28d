"""Figure 6c: are true gradients more alike inside the clusters that proxies found than across them?

Each sample's gradient of its mean answer loss, with respect to all parameters, is hashed into a sketch of m numbers (see
`diagnosis`) while the backward pass makes it: 120 gradients of 135M parameters would take 65 GB. Inner products of
sketches are those of the gradients up to about |g| |g'| sqrt(2 / m); the error is also measured, on pairs whose gradients
are held in full.

    statistic = mean cosine of pairs inside clusters - mean cosine of pairs across them

is compared with its values when the labels are dealt anew among the samples, which preserves the clusters' sizes.
Shapes: n samples, P parameters, m numbers of a sketch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from ..diagnosis import add_to_sketch
from ..models import load_model
from ..proxy import sample_loss
from ..tokens import TokenTable
from .runs import Run

SKETCH = 1_048_573  # m, a prime: no row of a matrix is as long
_EXACT_BYTES = 4 << 30  # of gradients that are held in full
_MOST_EXACT = 6
_PERMUTATIONS = 9_999
_SEED_STEP = 1_000_003


@dataclass(frozen=True)
class Test:
    """A permutation test that preserves the clusters' sizes.

    Attributes:
        inside, across: mean cosines of pairs of one cluster, and of two.
        statistic: their difference.
        p_value: share of the permutations, the one that was found among them, whose statistic is at least as large.
        num_permutations: that were drawn.
    """

    inside: float
    across: float
    statistic: float
    p_value: float
    num_permutations: int


def permutation_test(cosines: np.ndarray, labels: np.ndarray, seed: int, num_permutations: int = _PERMUTATIONS) -> Test:
    """Test whether cosines [n, n] are larger inside the clusters of `labels` int [n] than across them."""
    rng = np.random.default_rng((seed, 5))
    names, of = np.unique(labels, return_inverse=True)
    off = cosines - np.diag(np.diag(cosines))
    sizes = np.bincount(of)
    pairs_inside = float((sizes * (sizes - 1)).sum())
    pairs_across = len(of) * (len(of) - 1) - pairs_inside

    def means(order: np.ndarray) -> tuple[float, float]:
        member = np.eye(len(names))[order]
        within = float(np.einsum("ik,ij,jk->", member, off, member, optimize=True))
        return within / pairs_inside, (float(off.sum()) - within) / pairs_across

    inside, across = means(of)
    found = inside - across
    more = sum(a - b >= found - 1e-12 for a, b in (means(rng.permutation(of)) for _ in range(num_permutations)))
    return Test(inside, across, found, (1 + more) / (1 + num_permutations), num_permutations)


def sketches_of(model: PreTrainedModel, tokens: TokenTable, rows: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Float32 [n, min(m, P)], sketches of the samples' gradients; no gradient is held longer than its parameter's turn."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    offsets = np.cumsum([0, *(p.numel() for p in parameters)])
    sketch = torch.zeros(min(size, int(offsets[-1])), device=parameters[0].device)

    def hashed(number: int, parameter: torch.nn.Parameter) -> None:
        assert parameter.grad is not None
        add_to_sketch(sketch, parameter.grad, int(offsets[number]), seed * _SEED_STEP + number)
        parameter.grad = None

    handles = [
        p.register_post_accumulate_grad_hook(lambda parameter, n=n: hashed(n, parameter)) for n, p in enumerate(parameters)
    ]
    out = []
    for row in tqdm(rows, desc="gradients", unit="sample", disable=None):
        sketch.zero_()
        torch.autograd.backward(sample_loss(model, tokens, int(row)))
        out.append(sketch.cpu().numpy().copy())
    for handle in handles:
        handle.remove()
    return np.stack(out)


def exact_cosines(model: PreTrainedModel, tokens: TokenTable, rows: np.ndarray) -> np.ndarray:
    """Float64 [n, n], with the gradients held in full; for a few rows."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    held = []
    for row in rows:
        found = torch.autograd.grad(sample_loss(model, tokens, int(row)), parameters)
        held.append(torch.cat([g.float().flatten() for g in found]).cpu())
    products = np.array([[float(a.double() @ b.double()) for b in held] for a in held])
    return cosines_of(products)


def cosines_of(products: np.ndarray) -> np.ndarray:
    """Cosines [n, n] from inner products."""
    norms = np.sqrt(np.maximum(np.diag(products), 1e-300))
    return products / norms[:, None] / norms[None, :]


def analyse(run: Run, num_samples: int, seed: int, size: int = SKETCH) -> dict[str, Any]:
    """The test on samples of all clusters, equal numbers of each as far as they go, drawn at random.

    Raises:
        ValueError: for one cluster.
    """
    started, plan = time.perf_counter(), run.plan
    if plan.num_clusters < 2:
        raise ValueError(f"{run.folder} has one cluster: there are no pairs across clusters")
    rng = np.random.default_rng((seed, 6))
    each = -(-num_samples // plan.num_clusters)
    members = [rng.permutation(np.flatnonzero(plan.cluster == c))[:each] for c in range(plan.num_clusters)]
    rows = np.sort(np.concatenate(members))
    model = load_model(run.samples.model_folder, run.recipe.model, torch.float32, run.ranks.device).eval()
    sketches = sketches_of(model, run.samples.tokens, rows, size, seed).astype(np.float64)
    cosines, labels = cosines_of(sketches @ sketches.T), plan.cluster[rows]
    test = permutation_test(cosines, labels, seed)
    num_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    compressed = num_parameters > size
    num_exact = min(_MOST_EXACT, len(rows), _EXACT_BYTES // (4 * num_parameters)) if compressed else 0
    errors: list[float] = []
    if num_exact > 1:
        checked = np.sort(rng.permutation(len(rows))[:num_exact])
        exact = exact_cosines(model, run.samples.tokens, rows[checked])
        errors = [abs(exact[a, b] - cosines[checked[a], checked[b]]) for a, b in combinations(range(num_exact), 2)]
    by_cluster = [[float(_mean_of_pairs(cosines, labels == a, labels == b)) for b in range(plan.num_clusters)]
                  for a in range(plan.num_clusters)]
    numbers = {
        "num_samples": len(rows), "num_clusters": plan.num_clusters, "seed": seed, "mean_cosine_inside": test.inside,
        "mean_cosine_across": test.across, "statistic": test.statistic, "p_value": test.p_value,
        "num_permutations": test.num_permutations, "mean_cosines_of_clusters": by_cluster,
        "sketch_numbers": min(size, num_parameters), "num_parameters": num_parameters,
        "sketch_standard_error_of_a_cosine": (2 / size) ** 0.5 if compressed else 0.0,
        "sketch_largest_error_of_pairs": max(errors) if errors else 0.0, "num_pairs_checked": len(errors),
        "seconds": time.perf_counter() - started, "sample_ids": [plan.ids[r] for r in rows], "labels": labels.tolist(),
    }
    run.save("gradients", numbers)
    order = np.argsort(labels, kind="stable")
    inside = labels[:, None] == labels[None, :]
    upper = np.triu(np.ones_like(inside), 1).astype(bool)
    with run.picture("gradients", 10, 4) as figure:
        left, right = figure.subplots(1, 2)
        shown = cosines[np.ix_(order, order)] - np.eye(len(rows))
        image = left.imshow(shown, cmap="magma", vmin=0, vmax=float(np.quantile(shown, 0.99)))
        figure.colorbar(image, ax=left)
        left.set(title="cosines of true gradients, by cluster", xlabel="sample", ylabel="sample")
        low, high = np.quantile(cosines[upper], [0.001, 0.999])
        bins = np.linspace(low, high, 50)
        for mask, name in ((inside & upper, "inside clusters"), (~inside & upper, "across")):
            right.hist(cosines[mask], bins, density=True, alpha=0.6, label=name)
        right.set(title=f"p = {test.p_value:.4g}, difference {test.statistic:+.4f}", xlabel="cosine")
        right.legend()
    return numbers


def _mean_of_pairs(cosines: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    block = cosines[np.ix_(a, b)]
    if np.array_equal(a, b):
        n = len(block)
        return float((block.sum() - np.trace(block)) / (n * (n - 1))) if n > 1 else float("nan")
    return float(block.mean())
