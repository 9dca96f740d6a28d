"""Rademacher projection of long gradients, in blocks from a counter: the matrix is never held.

Entry (i, j) of the matrix [P, D] is +1 or -1 by one bit of a hash of (seed, i, j // 64): 64 entries of a row come from one
number, by integer arithmetic alone, so that every device makes the same matrix. Source of the hash: splitmix64 (Steele, Lea,
Flood 2014). Shapes: P parameters, D dimensions of the projection, B samples.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812

_BLOCK = 1 << 24  # entries of the matrix that exist at a time
_GOLDEN, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685  # as signed 64-bit numbers


def signs(seed: int, first: int, last: int, dim: int, device: torch.device) -> torch.Tensor:
    """Rows `first` to `last` of the matrix, float32 [rows, D] of +1 and -1."""
    words = dim // 64
    counter = torch.arange(first * words, last * words, dtype=torch.int64, device=device)
    octets = _hash(counter * _GOLDEN + _mixed_seed(seed, device)).view(torch.uint8)  # the lowest first
    return F.embedding(octets.int(), _table(device)).view(last - first, dim)


@cache
def _table(device: torch.device) -> torch.Tensor:
    """Float32 [256, 8], the signs that each octet's bits stand for, the lowest first."""
    bits = torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device) & 1
    return (2 * bits - 1).float()


def project(gradients: torch.Tensor, dim: int, seed: int) -> torch.Tensor:
    """Float32 [B, D], gradients times the matrix, each then divided by its l2 norm (zero stays zero).

    Args:
        gradients: float32 [B, P].
        dim: D, a multiple of 64.
        seed: of the matrix.
    """
    out = torch.zeros(len(gradients), dim, dtype=torch.float32, device=gradients.device)
    rows = max(1, _BLOCK // dim)
    for first in range(0, gradients.shape[1], rows):
        last = min(first + rows, gradients.shape[1])
        out += gradients[:, first:last] @ signs(seed, first, last, dim, gradients.device)
    norms = out.norm(dim=1, keepdim=True)
    return out / torch.where(norms > 0, norms, 1.0)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64 on int64 [n]; products wrap around."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _mixed_seed(seed: int, device: torch.device) -> torch.Tensor:
    return _hash(torch.tensor(seed + 1, dtype=torch.int64, device=device) * _GOLDEN)
