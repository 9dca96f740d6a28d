"""Stage 8: a global batch -> what each of W ranks computes, in micro-batches. Pure numpy, the same on all ranks.

A micro-batch is `micro_batch_size` samples padded to the longest of them or, with packing, samples end to end in packs of
at most `max_tokens` tokens. Since lengths are known, every rank knows every rank's micro-batches without talking, and makes
as many as the others. Shapes: B samples of a global batch, W ranks, G micro-batches of a rank, n samples of one.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from .plan import Plan
from .schedule import GlobalBatch, Schedule

Allocation = Literal["cluster", "tokens"]


@dataclass(frozen=True)
class Packing:
    """How samples are laid end to end.

    Attributes:
        max_tokens: of a pack; attention never leaves a sample, but a pack's mask is as large as the pack.
        tokens_per_micro_batch: of all its packs.
    """

    max_tokens: int
    tokens_per_micro_batch: int

    def __post_init__(self) -> None:
        """Check both."""
        if not 1 <= self.max_tokens <= self.tokens_per_micro_batch:
            raise ValueError(
                f"packs of {self.max_tokens} tokens do not fit into tokens_per_micro_batch {self.tokens_per_micro_batch}: "
                "lower train.max_tokens or raise train.tokens_per_micro_batch"
            )

    @property
    def packs_per_micro_batch(self) -> int:
        """At most."""
        return self.tokens_per_micro_batch // self.max_tokens


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank.

    Attributes:
        rows: int64 [n], rows of the plan.
        weights: float64 [n], of the samples in this step; fillers have 0.
        is_filler: bool [n], copies that only keep the ranks in step.
        pack: int64 [n], the line of the micro-batch that a sample stands in; without packing each has its own.
    """

    rows: np.ndarray
    weights: np.ndarray
    is_filler: np.ndarray
    pack: np.ndarray


@dataclass(frozen=True)
class Allocator:
    """Cuts global batches.

    Attributes:
        dp_world_size: W.
        allocation: `cluster`: samples sorted by cluster and cut into W pieces of equal counts, so that each rank has its own
            clusters. `tokens`: dealt by cost, so that ranks finish together.
        micro_batch_size: samples of a micro-batch; W x micro_batch_size must divide B. Not used in packing.
        packing: or None, which pads.
        quadratic_cost: c of a sample's cost l + c l^2 of l tokens, see `shapes.quadratic_cost`.
    """

    dp_world_size: int
    allocation: Allocation = "cluster"
    micro_batch_size: int = 1
    packing: Packing | None = None
    quadratic_cost: float = 0.0

    def __post_init__(self) -> None:
        """Check the name."""
        if self.allocation not in get_args(Allocation):
            raise ValueError(f"allocation {self.allocation!r}: {' or '.join(get_args(Allocation))}")

    def cut(self, schedule: Schedule, batch: GlobalBatch) -> list[list[MicroBatch]]:
        """Every rank's micro-batches, G of each.

        Raises:
            ValueError: if sizes do not divide, or a sample is longer than a pack.
        """
        if self.packing is None:
            return self._padded(schedule, batch)
        return self._packed(schedule, batch, self.packing)

    def loads(self, plan: Plan, shares: list[list[MicroBatch]]) -> np.ndarray:
        """What each rank computes, in tokens of a short sample: float64 [W].

        Padding of micro-batches is included; in packing what is free at the ends of packs is not.
        """
        return np.array([sum(self._cost(plan.num_tokens[part.rows]) for part in share) for share in shares])

    def _cost(self, lengths: np.ndarray) -> float:
        if self.packing is not None:
            return float(self._costs(lengths).sum())
        return len(lengths) * float(self._costs(lengths.max()))

    def _costs(self, lengths: np.ndarray) -> np.ndarray:
        return lengths * (1.0 + self.quadratic_cost * lengths)

    def _padded(self, schedule: Schedule, batch: GlobalBatch) -> list[list[MicroBatch]]:
        """The free slots of a short last batch are copies of the shortest row with weight 0.

        `cluster` interleaves a rank's samples over its micro-batches, `tokens` makes micro-batches of like lengths.
        """
        size = self.micro_batch_size
        accumulation = accumulation_steps(schedule.global_batch_size, size, self.dp_world_size)
        share = size * accumulation
        lengths = schedule.plan.num_tokens
        if self.allocation == "cluster":
            pieces, grid = self._by_cluster(schedule, batch), np.arange(share).reshape(size, accumulation).T
        else:
            pieces = deal(self._costs(lengths[batch.rows]), self.dp_world_size, share)
        out = []
        for piece in pieces:
            rows, weights, is_filler = _filled(schedule, batch, piece, share)
            if self.allocation == "tokens":
                grid = np.argsort(-lengths[rows], kind="stable").reshape(accumulation, size)
            out.append([MicroBatch(rows[at], weights[at], is_filler[at], np.arange(size)) for at in grid])
        return out

    def _packed(self, schedule: Schedule, batch: GlobalBatch, packing: Packing) -> list[list[MicroBatch]]:
        """As few micro-batches as the fullest rank needs, and packs of like size; a filler only where a rank has too few."""
        lengths = schedule.plan.num_tokens[batch.rows]
        if lengths.max() > packing.max_tokens:
            longest = int(batch.rows[lengths.argmax()])
            raise ValueError(
                f"sample {schedule.plan.ids[longest]} has {lengths.max()} tokens, more than a pack of {packing.max_tokens}: "
                "raise train.max_tokens or lower data.max_length"
            )
        if self.allocation == "cluster":
            pieces = self._by_cluster(schedule, batch)
        else:
            pieces = deal(self._costs(lengths), self.dp_world_size)
        needed = [_packs_needed(lengths[piece], packing.max_tokens) for piece in pieces]
        num_micro = max(-(-packs // packing.packs_per_micro_batch) for packs in needed)
        out = []
        for piece, packs in zip(pieces, needed, strict=True):
            packs = min(len(piece), -(-packs // num_micro) * num_micro)
            pack = _pack(lengths[piece], packing.max_tokens, packs)
            assert pack is not None  # more packs than are needed
            loads = np.bincount(pack, lengths[piece], minlength=packs)
            groups = deal(loads, num_micro, packing.packs_per_micro_batch)
            groups.sort(key=lambda group: -loads[group].sum())  # those of other ranks with the same number are alike
            share = []
            for group in groups:
                members = [np.flatnonzero(pack == number) for number in group]
                inside = np.concatenate([piece[:0], *(piece[m] for m in members)])
                rows, weights, is_filler = _filled(schedule, batch, inside, max(1, len(inside)))
                lines = np.repeat(np.arange(len(members)), [len(m) for m in members]) if len(inside) else np.zeros(1, int)
                share.append(MicroBatch(rows, weights, is_filler, lines))
            out.append(share)
        return out

    def _by_cluster(self, schedule: Schedule, batch: GlobalBatch) -> list[np.ndarray]:
        order = np.lexsort((np.arange(len(batch.rows)), schedule.plan.cluster[batch.rows]))
        return np.array_split(order, self.dp_world_size)


def accumulation_steps(global_batch_size: int, micro_batch_size: int, dp_world_size: int) -> int:
    """G, the padded micro-batches a rank runs in one step.

    Raises:
        ValueError: naming the sizes that would fit, if W x micro_batch_size does not divide B.
    """
    per_pass = micro_batch_size * dp_world_size
    if global_batch_size % per_pass == 0:
        return global_batch_size // per_pass
    micro = [m for m in range(1, global_batch_size // dp_world_size + 1) if global_batch_size % (m * dp_world_size) == 0]
    world = [w for w in range(1, global_batch_size + 1) if global_batch_size % (micro_batch_size * w) == 0]
    lower = global_batch_size // per_pass * per_pass
    near = [str(b) for b in (lower, lower + per_pass) if b]
    options = [f"global_batch_size {' or '.join(near)}"]
    if micro:
        options.append(f"micro_batch_size {', '.join(map(str, micro))}")
    if world:
        options.append(f"{', '.join(map(str, world))} ranks")
    raise ValueError(
        f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} x "
        f"{dp_world_size} ranks = {per_pass}; these would fit: {'; or '.join(options)}"
    )


def deal(costs: np.ndarray, num_hands: int, most: int | None = None) -> list[np.ndarray]:
    """Dearest first, each to the hand with the least cost that has a free slot; ties to the lower one.

    Args:
        costs: [n].
        num_hands: among which.
        most: slots of a hand; None: any number.
    """
    hands: list[list[int]] = [[] for _ in range(num_hands)]
    loads: list[tuple[float, int]] = [(0.0, hand) for hand in range(num_hands)]
    for i in np.argsort(-costs, kind="stable"):
        load, hand = heapq.heappop(loads)
        hands[hand].append(int(i))
        if most is None or len(hands[hand]) < most:
            heapq.heappush(loads, (load + float(costs[i]), hand))
    return [np.array(sorted(hand), dtype=np.int64) for hand in hands]


def _filled(
    schedule: Schedule, batch: GlobalBatch, piece: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, weights, is_filler of `piece`, filled up to `size` samples."""
    fill = size - len(piece)
    rows = np.concatenate([batch.rows[piece], np.full(fill, schedule.filler)])
    weights = np.concatenate([batch.weights[piece], np.zeros(fill)])
    return rows, weights, np.arange(size) >= len(piece)


def _packs_needed(lengths: np.ndarray, max_tokens: int) -> int:
    """The least number of packs that `_pack` fills without overflow."""
    packs = -(-int(lengths.sum()) // max_tokens)
    while _pack(lengths, max_tokens, packs) is None:
        packs += 1
    return packs


def _pack(lengths: np.ndarray, max_tokens: int, num_packs: int) -> np.ndarray | None:
    """The pack of each sample int64 [n], longest first into the emptiest; None where one does not fit."""
    pack = np.zeros(len(lengths), dtype=np.int64)
    loads = [(0, number) for number in range(num_packs)]
    for i in np.argsort(-lengths, kind="stable"):
        load, number = heapq.heappop(loads)
        load += int(lengths[i])
        if load > max_tokens:
            return None
        pack[i] = number
        heapq.heappush(loads, (load, number))
    return pack
