"""Stage 3: tokens -> unit gradient proxies, one forward pass of the model, sharded over ranks and resumable.

    g(x) = 1/|T(x)| sum_{t in T(x)} (p_t - 1) h_t,   then divided by its l2 norm,

with h_t the hidden state that lm_head reads to predict token t and p_t = exp(-CE_t). Hidden states and a chunked cross
entropy give everything; no [B, T, V] tensor exists. Source: arXiv 2609.12584, section 4.1.

A rank that is free takes the next of the shards, which do not depend on the number of ranks (`shards`). Shapes: N samples,
H hidden, P projection, B samples of a batch, T tokens, n supervised positions of a batch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from .distributed import Ranks
from .features import PROJECTION_DIM, projection_matrix
from .files import require_space
from .loss import chunked_cross_entropy, supervised_positions
from .memory import is_out_of_memory
from .shards import length_batches, missing_shards, padding_share, shard_batches, shard_bytes, write_shard
from .tokens import TokenTable, pad_batch

T = TypeVar("T")
VERSION = 2  # part of the key: raise it when proxies of an unchanged input would change
_CHECKED_ROWS = 4
_PADDING_TOLERANCE = 0.05  # of the largest hidden state; bf16 rounds otherwise in another batch
_LOGIT_TOLERANCE = 0.01  # of the largest logit; bf16 rounds to 0.004


def proxy_key(
    token_key: str, model_hash: str, dtype: torch.dtype, device: torch.device, tokens_per_batch: int, cpu_threads: int
) -> str:
    """Hash of everything that decides the proxies, up to the rounding of another version of torch or attention kernel."""
    threads = cpu_threads if device.type == "cpu" else 0
    parts = (token_key, model_hash, dtype, device.type, tokens_per_batch, threads, VERSION)
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).hexdigest()


@torch.no_grad()
def batch_losses(
    model: PreTrainedModel, input_ids: torch.Tensor, samples: torch.Tensor, predictors: torch.Tensor, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward pass to the hidden states that lm_head reads, and on to the token losses.

    Args:
        model: a causal language model.
        input_ids: int64 [B, T], padded on the right: a causal model needs no mask then.
        samples, predictors, targets: int64 [n], see `loss.supervised_positions`.
    Returns:
        the hidden state of each supervised position [n, H], its token loss float32 [n].
    """
    hidden = model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
    chosen = hidden[samples, predictors]
    head = model.get_output_embeddings()
    return chosen, chunked_cross_entropy(chosen, head.weight, getattr(head, "bias", None), targets)


def sample_loss(model: PreTrainedModel, tokens: Rows, row: int) -> torch.Tensor:
    """The mean token loss of one sample alone, with its graph."""
    sample, device = tokens[row], next(model.parameters()).device
    lines, predictors, targets = (t.to(device) for t in supervised_positions(torch.from_numpy(sample["labels"])[None]))
    ids = torch.from_numpy(sample["input_ids"])[None].to(device)
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[lines, predictors]
    head = model.get_output_embeddings()
    return chunked_cross_entropy(hidden, head.weight, getattr(head, "bias", None), targets).mean()


def gradient_proxies(
    samples: torch.Tensor, hidden: torch.Tensor, losses: torch.Tensor, num_samples: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Proxies from supervised positions.

    Args:
        samples: int64 [n].
        hidden: [n, H].
        losses: float [n], token losses.
        num_samples: B.
    Returns:
        unit proxies [B, H] (zero where the proxy is zero), their norms before normalisation [B], mean token losses [B].
    """
    kind = losses.dtype
    zeros = torch.zeros(num_samples, dtype=kind, device=losses.device)
    counts = zeros.index_add(0, samples, torch.ones_like(losses)).clamp(min=1)
    scaled = torch.expm1(-losses)[:, None] * hidden.to(kind)  # p_t - 1, without cancellation for confident tokens
    sums = torch.zeros(num_samples, hidden.shape[1], dtype=kind, device=hidden.device).index_add(0, samples, scaled)
    means = sums / counts[:, None]
    norms = means.norm(dim=1)
    mean_losses = zeros.index_add(0, samples, losses) / counts
    return means / torch.where(norms > 0, norms, 1.0)[:, None], norms, mean_losses


def extract(
    tokens: TokenTable, folder: Path, load: Callable[[], PreTrainedModel], ranks: Ranks, *, key: str, pad_id: int,
    tokens_per_batch: int, cpu_threads: int, hidden_size: int,
) -> int:  # collective
    """Write the shards that are missing in `folder`.

    Args:
        tokens: the samples.
        folder: of this set of proxies.
        load: called on a rank that is given work, once.
        ranks: this rank among all.
        key: see `proxy_key`; every shard bears it.
        pad_id: fills padding.
        tokens_per_batch: padded tokens of a forward pass.
        cpu_threads: of each rank on CPU, alike for any number of ranks.
        hidden_size: H, for the space that is needed.
    Returns:
        the number of shards that were there already.
    Raises:
        ValueError: if proxies are not finite, naming sample ids, or if the model's logits are not head x hidden.
    """
    batches = length_batches(tokens.num_tokens, tokens_per_batch)
    shards = shard_batches(batches)

    def unfinished() -> list[int]:
        folder.mkdir(parents=True, exist_ok=True)
        missing = missing_shards(folder, len(shards))
        num_rows = sum(len(batch) for s in missing for batch in shards[s])
        require_space(folder, shard_bytes(num_rows, len(missing), hidden_size), "extraction")
        return missing

    missing = ranks.on_main(unfinished)
    if missing:
        ranks.print(
            f"[proxies] {int(tokens.num_tokens.sum())} tokens of {len(tokens)} samples in {len(batches)} batches of at most "
            f"{tokens_per_batch}, {padding_share(tokens.num_tokens, batches):.1%} padding; {len(missing)} of {len(shards)} "
            "shards to do"
        )
    model, room = None, Room()
    progress = _Progress([int(sum(tokens.num_tokens[b].sum() for b in shards[s])) for s in missing], ranks)
    with cpu_threads_alike(cpu_threads, ranks.device):
        for number in ranks.shares(len(missing)):
            if model is None:
                model = _loaded(load, tokens, ranks.device)
            shard, started = missing[number], time.perf_counter()
            arrays = run_shard(model, tokens, shards[shard], pad_id, ranks.device, room)
            write_shard(folder, shard, key, arrays, time.perf_counter() - started)
            progress.finished(number)
    progress.close()
    del model
    if ranks.device.type == "cuda":
        torch.cuda.empty_cache()
    ranks.gather(len(missing))  # all shards are on disk
    return len(shards) - len(missing)


def _loaded(load: Callable[[], PreTrainedModel], tokens: TokenTable, device: torch.device) -> PreTrainedModel:
    try:
        model = load().eval()
        _check_model(model, tokens, device)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            f"out of memory loading the model for extraction: each rank holds a whole one; use GPUs with more "
            f"memory, or fewer ranks on a GPU ({str(error).splitlines()[0]})"
        ) from error
    return model


class _Progress:
    """Tokens done by all ranks, as far as rank 0 can tell from the shards it is given; ten lines in a job's log."""

    def __init__(self, num_tokens: list[int], ranks: Ranks):
        self.done, self.ranks, self.started = np.cumsum(num_tokens), ranks, time.perf_counter()
        quiet = not (ranks.is_main and num_tokens) or None
        self.bar = tqdm(total=sum(num_tokens), desc="proxies", unit="tok", disable=quiet)
        self.shown = 0

    def finished(self, number: int) -> None:
        self.bar.update(int(self.done[number]) - self.bar.n)
        tenth = 10 * (number + 1) // len(self.done)
        if self.bar.disable and tenth > self.shown:
            self.shown = tenth
            rate = float(self.done[number]) / (time.perf_counter() - self.started)
            left = (float(self.done[-1]) - float(self.done[number])) / rate
            shards = f"{number + 1} of {len(self.done)} shards"
            self.ranks.print(f"[proxies] {shards}, {rate:.0f} tokens/s, about {left:.0f} s left")

    def close(self) -> None:
        self.bar.close()


class Rows(Protocol):
    """What a forward pass asks of a table of samples; `TokenTable` is one."""

    ids: list[str]
    num_tokens: np.ndarray

    def __getitem__(self, row: int, /) -> dict[str, Any]:
        """Input ids and labels int64 [T] of one sample."""
        ...


@dataclass
class Room:
    """Padded tokens of a forward pass that memory has room for, as far as is known."""

    tokens: float = float("inf")


@dataclass(frozen=True)
class _Batch:
    """A forward pass's input: what `batch_losses` takes."""

    input_ids: torch.Tensor
    samples: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def of(cls, tokens: Rows, rows: np.ndarray, pad_id: int, device: torch.device) -> _Batch:
        padded = pad_batch([tokens[int(row)] for row in rows], pad_id)
        positions = supervised_positions(torch.from_numpy(padded["labels"]))  # on the host: a GPU would be waited for
        tensors = (torch.from_numpy(padded["input_ids"]), *positions)
        return cls(*(t.pin_memory() for t in tensors)) if device.type == "cuda" else cls(*tensors)

    def to(self, device: torch.device) -> _Batch:
        tensors = (self.input_ids, self.samples, self.predictors, self.targets)
        return _Batch(*(t.to(device, non_blocking=True) for t in tensors))


def run_batches(
    model: PreTrainedModel, tokens: Rows, batches: list[np.ndarray], pad_id: int, device: torch.device, room: Room,
    finish: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], T],
) -> Iterator[tuple[np.ndarray, T]]:
    """Each batch's rows, and what `finish` makes of the pass.

    It is given the sample of each supervised position int64 [n], its hidden state [n, H], its token loss [n] and B. The next
    batch is prepared while the model works. A batch that does not fit into memory is halved until it does, and so are those
    behind it: `room` only shrinks.

    Raises:
        ValueError: if a sample alone does not fit.
    """
    waiting = list(reversed(batches))
    following: tuple[np.ndarray | None, Future[_Batch] | None] = (None, None)
    with ThreadPoolExecutor(1) as pool:
        while waiting:
            rows = waiting.pop()
            size = len(rows) * int(tokens.num_tokens[rows].max())
            if size > room.tokens and len(rows) > 1:
                half = len(rows) // 2
                waiting += [rows[half:], rows[:half]]
                continue
            ready = following[1] if following[0] is rows else None
            batch = ready.result() if ready is not None else _Batch.of(tokens, rows, pad_id, device)
            if waiting:
                following = (waiting[-1], pool.submit(_Batch.of, tokens, waiting[-1], pad_id, device))
            result: list[T] = []
            try:
                result.append(_one_pass(model, batch.to(device), finish))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                problem = str(error).splitlines()[0]
            if result:
                yield rows, result[0]
                continue
            # Outside of the handler, whose traceback would keep the failed pass's tensors alive.
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if len(rows) == 1:
                raise ValueError(
                    f"out of memory on sample {tokens.ids[rows[0]]} alone ({size} tokens): lower data.max_length ({problem})"
                )
            room.tokens = size / 2
            waiting.append(rows)
            print(
                f"[proxies] out of memory with {size} tokens in a batch: going on with at most {size // 2}; "
                "selection.tokens_per_batch says how many to begin with", flush=True,
            )  # fmt: skip


def _one_pass(
    model: PreTrainedModel, batch: _Batch, finish: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], T]
) -> T:
    hidden, losses = batch_losses(model, batch.input_ids, batch.samples, batch.predictors, batch.targets)
    return finish(batch.samples, hidden, losses, len(batch.input_ids))


def run_shard(
    model: PreTrainedModel, tokens: TokenTable, batches: list[np.ndarray], pad_id: int, device: torch.device, room: Room
) -> dict[str, np.ndarray]:
    """The arrays of a shard, see `shards.write_shard`; they stay on the device until its last batch is under way.

    Raises:
        ValueError: if proxies are not finite, naming sample ids.
    """
    all_rows: list[np.ndarray] = []
    parts: dict[str, list[torch.Tensor]] = {"features": [], "norms": [], "losses": []}
    for rows, (features, norms, mean_losses) in run_batches(model, tokens, batches, pad_id, device, room, gradient_proxies):
        all_rows.append(rows)
        parts["features"].append(features.half())
        parts["norms"].append(norms.float())
        parts["losses"].append(mean_losses.float())
    joined = {name: torch.cat(tensors) for name, tensors in parts.items()}
    features = joined["features"].float()
    if features.shape[1] > PROJECTION_DIM:
        matrix = torch.from_numpy(projection_matrix(features.shape[1])).to(device)
        joined["projection"] = (features @ matrix).half()
    arrays = {"rows": np.concatenate(all_rows), **{name: tensor.cpu().numpy() for name, tensor in joined.items()}}
    finite = np.isfinite(arrays["features"]).all(axis=1) & np.isfinite(arrays["losses"])
    if not finite.all():
        bad = [tokens.ids[row] for row in arrays["rows"][~finite]]
        raise ValueError(f"the model gives NaN or infinity on samples {', '.join(bad[:10])}: check its weights, dtype")
    return arrays


@contextmanager
def cpu_threads_alike(number: int, device: torch.device) -> Iterator[None]:
    """A fixed number of CPU threads while the model runs: sums depend on how they are split."""
    before = torch.get_num_threads()
    torch.set_num_threads(number if device.type == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
def _check_model(model: PreTrainedModel, tokens: TokenTable, device: torch.device) -> None:
    """Refuse models whose proxies would be wrong without a word.

    These are models whose logits are more than head x hidden (scaled, capped), and models that look ahead, so that padding
    behind a sample changes it.
    """
    middle = np.argsort(tokens.num_tokens, kind="stable")[len(tokens) // 2 :][:_CHECKED_ROWS]
    batch = _Batch.of(tokens, middle, 0, device).to(device)
    chosen = (batch.samples, batch.predictors)
    own = model(input_ids=batch.input_ids, use_cache=False).logits[chosen].float()
    head = model.get_output_embeddings()
    hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state[chosen]
    ours = torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None)).float()
    difference, largest = float((ours - own).abs().max()), float(own.abs().max())
    if difference > _LOGIT_TOLERANCE * largest:  # NaN passes here and is named by sample later
        raise ValueError(
            f"{type(model).__name__}: its logits differ by up to {difference:.3g} (the largest is {largest:.3g}) from "
            "hidden states x output embeddings: it scales or caps them, which gradient proxies do not support"
        )
    row = int(middle[0])
    unpadded = torch.from_numpy(np.asarray(tokens[row]["input_ids"], dtype=np.int64)).to(device)[None]
    padded = torch.cat([unpadded, torch.zeros_like(unpadded)], dim=1)
    alone, followed = (model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0] for ids in (unpadded, padded))
    moved = float((alone - followed[: len(alone)]).abs().max())
    if moved > _PADDING_TOLERANCE * float(alone.abs().max()):
        raise ValueError(
            f"{type(model).__name__}: padding behind a sample changes its hidden states by up to {moved:.3g}, so it looks "
            "ahead and is no causal language model (is_decoder, in its configuration): gradient proxies need one"
        )
