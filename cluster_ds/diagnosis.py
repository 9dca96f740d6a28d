"""Stage 13c: what the ranks' gradients have to do with each other, seen before data parallelism averages them.

Every parameter's gradient is hashed, as soon as a backward pass has made it, into a sketch of m numbers: element i goes,
with a random sign, to place i mod m. Inner products of sketches are those of the gradients up to a standard error of about
|g| |g'| sqrt(2 / m); a model with at most m parameters is not compressed at all. One more pass over the gradients and m
numbers a rank are the cost; `seconds` says it. Shapes: W ranks, m numbers, P parameters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_SIZE = 65_521  # m, a prime: no row of a matrix is as long
_BLOCK = 1 << 24  # elements whose signs are drawn at a time


@dataclass(frozen=True)
class Diagnosis:
    """Of one optimizer step.

    Attributes:
        cosines: W x W, of the ranks' gradients; they mean most under allocation `cluster`.
        gradient_diversity: sum |g_b|^2 / |sum g_b|^2 over the weighted gradients g_b of all ranks' micro-batches.
        num_gradients: micro-batches of all ranks, but for those of fillers alone; diversity scales as 1 / number, so compare
            number x diversity.
        standard_error: of a cosine, about; 0 where nothing was compressed.
        seconds: of this rank's host; a GPU works on beside it.
    """

    cosines: list[list[float]]
    gradient_diversity: float
    num_gradients: int
    standard_error: float
    seconds: float

    @property
    def mean_cosine(self) -> float | None:
        """Over pairs of ranks; None for one rank."""
        n = len(self.cosines)
        return (sum(map(sum, self.cosines)) - sum(self.cosines[r][r] for r in range(n))) / (n * (n - 1)) if n > 1 else None


class GradientWatch:
    """Sketches the gradients of one optimizer step: `begin` before its first micro-batch, `end` after its last backward."""

    def __init__(self, module: torch.nn.Module, device: torch.device, seed: int = 0):
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        sizes = [getattr(p, "ds_numel", p.numel()) for p in self.parameters]  # at ZeRO stage 3 a parameter itself is empty
        self.offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self.num_parameters, self.device, self.seed = sum(sizes), device, seed
        self.size = min(_SIZE, self.num_parameters)
        self.handles: list[Any] = []

    def begin(self) -> None:
        """Look at gradients from here on."""
        self.total = torch.zeros(self.size, device=self.device)
        self.current = torch.zeros_like(self.total)
        self.squares = torch.zeros((), dtype=torch.float64, device=self.device)
        self.count, self.seconds = 0, 0.0
        for number, parameter in enumerate(self.parameters):
            self.handles.append(parameter.register_hook(lambda gradient, n=number: self._add(n, gradient)))

    def next_micro_batch(self, is_empty: bool = False) -> None:
        """A backward pass is done; `is_empty`: over fillers alone."""
        self.total += self.current
        self.squares += self.current.double().square().sum()
        self.count += not is_empty
        self.current.zero_()

    def end(self) -> Diagnosis:  # collective
        """What all ranks have seen."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        started = time.perf_counter()
        sketches = [torch.empty_like(self.total) for _ in range(dist.get_world_size())]
        dist.all_gather(sketches, self.total)  # collective
        sums = torch.stack([self.squares, torch.full_like(self.squares, self.count)])
        dist.all_reduce(sums)  # collective
        products = torch.stack(sketches).double()
        products = products @ products.T
        norms = products.diagonal().clamp(min=1e-300).sqrt()
        squares, count = sums.tolist()
        return Diagnosis(
            cosines=(products / norms[:, None] / norms[None]).tolist(),
            gradient_diversity=squares / max(float(products.sum()), 1e-300), num_gradients=int(count),
            standard_error=0.0 if self.size == self.num_parameters else (2 / self.size) ** 0.5,
            seconds=self.seconds + time.perf_counter() - started,
        )

    @torch.no_grad()
    def _add(self, number: int, gradient: torch.Tensor) -> None:
        started = time.perf_counter()
        add_to_sketch(self.current, gradient, self.offsets[number], self.seed * 1_000_003 + number)
        self.seconds += time.perf_counter() - started


@torch.no_grad()
def add_to_sketch(sketch: torch.Tensor, gradient: torch.Tensor, offset: int, seed: int) -> None:
    """Hash a parameter's gradient into a sketch [m]: element i goes, with a random sign, to place (offset + i) mod m."""
    flat, size = gradient.detach().reshape(-1), len(sketch)
    signs = torch.Generator(device=sketch.device).manual_seed(seed)
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK].float()
        drawn = torch.randint(0, 2, (len(block),), generator=signs, device=sketch.device, dtype=torch.int8)
        block = block * (2 * drawn - 1)
        first = (offset + start) % size
        rows = -(-(first + len(block)) // size)
        padded = torch.zeros(rows * size, device=sketch.device)
        padded[first : first + len(block)] = block
        sketch += padded.view(rows, size).sum(dim=0)
