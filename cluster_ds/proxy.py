"""Stage 3: tokens -> unit gradient proxies, one forward pass of the model, sharded over ranks and resumable.

    g(x) = 1/|T(x)| sum_{t in T(x)} (p_t - 1) h_t,   then divided by its l2 norm,

with h_t the hidden state that lm_head reads to predict token t and p_t = exp(-CE_t). Hidden states and a chunked cross
entropy give everything; no [B, T, V] tensor exists. Source: arXiv 2609.12584, section 4.1.

Batches are a pure function of the lengths and a token budget, made over all rows before ranks take them, so proxies do
not depend on the number of ranks. Shapes: N samples, H hidden, B samples of a batch, n supervised positions of a batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tqdm import tqdm
from transformers import PreTrainedModel

from .distributed import Ranks
from .files import commit_file, hash_files, read_json, require_space, write_json
from .loss import chunked_cross_entropy, supervised_positions
from .memory import is_out_of_memory
from .tokens import TokenTable, pad_batch

VERSION = 1  # part of the key: raise it when proxies of an unchanged input would change
_BATCHES_PER_SHARD = 16
_MIN_SHARDS = 16
_ROW_BYTES = 16  # row number, norm and loss beside the features
_SHARD_BYTES = 8192  # a header and a sidecar, in whole blocks
_CHECKED_ROWS = 4
_LOGIT_TOLERANCE = 0.01  # of the largest logit; bf16 rounds to 0.004


@dataclass(frozen=True)
class Proxies:
    """What the forward pass leaves of every sample, in the order of the token table.

    Attributes:
        features: float16 [N, H], unit vectors.
        norms: float32 [N], lengths of the proxies before normalisation.
        losses: float32 [N], mean token loss.
    """

    features: np.ndarray
    norms: np.ndarray
    losses: np.ndarray


def length_batches(lengths: np.ndarray, tokens_per_batch: int) -> list[np.ndarray]:
    """Group rows of like length so that rows x longest <= tokens_per_batch; a longer row stands alone.

    Args:
        lengths: int64 [N].
        tokens_per_batch: padded tokens of a batch.
    Returns:
        arrays of rows, longest batches first; every row once.
    """
    order = np.argsort(-lengths, kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, tokens_per_batch // int(lengths[order[start]]))
        batches.append(order[start : start + size])
        start += size
    return batches


def shard_batches(batches: list[np.ndarray]) -> list[list[np.ndarray]]:
    """Deal batches to shards of equal work; their number does not depend on the ranks."""
    num_shards = min(len(batches), max(_MIN_SHARDS, -(-len(batches) // _BATCHES_PER_SHARD)))
    return [batches[s::num_shards] for s in range(num_shards)]


def proxy_key(
    token_key: str, model_hash: str, dtype: torch.dtype, device: torch.device, tokens_per_batch: int, cpu_threads: int
) -> str:
    """Hash of everything that decides the proxies' bits."""
    threads = cpu_threads if device.type == "cpu" else 0
    parts = (token_key, model_hash, dtype, device.type, tokens_per_batch, threads, VERSION)
    return hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=16).hexdigest()


@torch.no_grad()
def batch_losses(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One forward pass to the hidden states that lm_head reads.

    Args:
        model: a causal language model.
        input_ids, attention_mask, labels: int64 [B, T].
    Returns:
        the sample of each supervised position int64 [n], its hidden state [n, H], its token loss float32 [n].
    """
    hidden = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
    samples, predictors, targets = supervised_positions(labels)
    chosen = hidden[samples, predictors]
    head = model.get_output_embeddings()
    return samples, chosen, chunked_cross_entropy(chosen, head.weight, getattr(head, "bias", None), targets)


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
    counts = torch.bincount(samples, minlength=num_samples).clamp(min=1).to(kind)
    scaled = torch.expm1(-losses)[:, None] * hidden.to(kind)  # p_t - 1, without cancellation for confident tokens
    sums = torch.zeros(num_samples, hidden.shape[1], dtype=kind, device=hidden.device).index_add(0, samples, scaled)
    means = sums / counts[:, None]
    norms = means.norm(dim=1)
    mean_losses = torch.zeros(num_samples, dtype=kind, device=hidden.device).index_add(0, samples, losses) / counts
    return means / torch.where(norms > 0, norms, 1.0)[:, None], norms, mean_losses


def extract(
    tokens: TokenTable, folder: Path, load: Callable[[], PreTrainedModel], ranks: Ranks, *, pad_id: int,
    tokens_per_batch: int, cpu_threads: int, hidden_size: int,
) -> int:  # collective
    """Write the shards that are missing in `folder`; each rank takes whole shards.

    Args:
        tokens: the samples.
        folder: of this set of proxies, see `proxy_key`.
        load: called once on each rank that has work.
        ranks: this rank among all.
        pad_id: fills padding.
        tokens_per_batch: padded tokens of a forward pass.
        cpu_threads: of each rank on CPU, alike for any number of ranks.
        hidden_size: H, for the space that is needed.
    Returns:
        the number of shards that were there already.
    Raises:
        ValueError: if proxies are not finite, naming sample ids, or if the model's logits are not head x hidden.
    """
    shards = shard_batches(length_batches(tokens.num_tokens, tokens_per_batch))

    def unfinished() -> list[int]:
        folder.mkdir(parents=True, exist_ok=True)
        missing = [s for s in range(len(shards)) if not _sidecar(folder, s).is_file()]
        num_rows = sum(len(batch) for s in missing for batch in shards[s])
        needed = num_rows * (2 * hidden_size + _ROW_BYTES) + len(missing) * _SHARD_BYTES
        require_space(folder, needed, "extraction")
        return missing

    missing = ranks.on_main(unfinished)
    mine = missing[ranks.rank :: ranks.world_size]
    if mine:
        with _threads(cpu_threads, ranks.device):
            room = Room()
            try:
                model = load().eval()
                _check_head(model, tokens, ranks.device)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                raise ValueError(
                    f"out of memory loading the model for extraction: each rank holds a whole one; use GPUs with more "
                    f"memory, or fewer ranks on a GPU ({str(error).splitlines()[0]})"
                ) from error
            total = int(sum(tokens.num_tokens[b].sum() for s in mine for b in shards[s]))
            with tqdm(total=total, desc="proxies", unit="tok", disable=not ranks.is_main or None) as bar:
                for number, shard in enumerate(mine, start=1):
                    arrays = _run_shard(model, tokens, shards[shard], pad_id, ranks.device, room, bar)
                    _write_shard(folder, shard, arrays)
                    if bar.disable and number * 10 // len(mine) > (number - 1) * 10 // len(mine):  # a job's log
                        ranks.print(f"[proxies] rank 0 has finished {number} of its {len(mine)} shards")
            del model
            if ranks.device.type == "cuda":
                torch.cuda.empty_cache()
    ranks.gather(len(mine))  # all shards are on disk
    return len(shards) - len(missing)


def read_proxies(folder: Path, tokens: TokenTable, tokens_per_batch: int) -> Proxies:
    """All shards, verified, in the order of the token table.

    Raises:
        ValueError: naming the shard that is missing or damaged, with the remedy.
    """
    num_shards = len(shard_batches(length_batches(tokens.num_tokens, tokens_per_batch)))
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("rows", "features", "norms", "losses")}
    for shard in range(num_shards):
        path, sidecar = _shard(folder, shard), _sidecar(folder, shard)
        if not sidecar.is_file() or not path.is_file():
            raise ValueError(f"proxy shard {path} is missing: delete {sidecar} if it is there and run the command again")
        if hash_files([path]) != read_json(sidecar)["hash"]:
            raise ValueError(f"proxy shard {path} is damaged: delete {sidecar} and run the command again")
        for name, array in load_file(path).items():
            parts[name].append(array)
    order = np.argsort(np.concatenate(parts["rows"]))
    features, norms, losses = (np.concatenate(parts[n])[order] for n in ("features", "norms", "losses"))
    if len(features) != len(tokens):
        raise ValueError(f"{folder} holds {len(features)} proxies for {len(tokens)} samples: delete the folder")
    return Proxies(features, norms, losses)


@dataclass
class Room:
    """Padded tokens of a forward pass that memory has room for, as far as is known."""

    tokens: float = float("inf")


def run_batches(
    model: PreTrainedModel, tokens: TokenTable, batches: list[np.ndarray], pad_id: int, device: torch.device, room: Room
) -> Iterator[tuple[np.ndarray, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """`batch_losses` of each batch, with its rows in front.

    A batch that does not fit into memory is halved until it does, and so are those behind it: `room` only shrinks.

    Raises:
        ValueError: if a sample alone does not fit.
    """
    waiting = list(reversed(batches))
    while waiting:
        rows = waiting.pop()
        size = len(rows) * int(tokens.num_tokens[rows].max())
        if size > room.tokens and len(rows) > 1:
            half = len(rows) // 2
            waiting += [rows[half:], rows[:half]]
            continue
        batch = pad_batch([tokens[int(row)] for row in rows], pad_id)
        result = None
        try:
            result = batch_losses(model, **{k: torch.from_numpy(v).to(device) for k, v in batch.items()})
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            problem = str(error).splitlines()[0]
        if result is not None:
            yield rows, *result
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


def held_out_loss(
    tokens: TokenTable, load: Callable[[], PreTrainedModel], ranks: Ranks, *, pad_id: int, tokens_per_batch: int,
    cpu_threads: int,
) -> dict[str, float]:  # collective
    """Loss of a model on held-out samples.

    Returns:
        "sample_mean", "token_mean" (nats) and "num_samples".
    """
    batches = length_batches(tokens.num_tokens, tokens_per_batch)[ranks.rank :: ranks.world_size]
    sums: dict[int, float] = {}
    if batches:
        with _threads(cpu_threads, ranks.device):
            model = load().eval()
            for rows, samples, _, losses in run_batches(model, tokens, batches, pad_id, ranks.device, Room()):
                total = torch.zeros(len(rows), dtype=torch.float64).index_add(0, samples.cpu(), losses.double().cpu())
                sums.update(zip(rows.tolist(), total.tolist(), strict=True))
    merged = {row: value for part in ranks.gather(sums) for row, value in part.items()}
    ce = np.array([merged[row] for row in range(len(tokens))])
    return {
        "sample_mean": float((ce / tokens.num_supervised).mean()),
        "token_mean": float(ce.sum() / tokens.num_supervised.sum()),
        "num_samples": len(tokens),
    }


def _run_shard(
    model: PreTrainedModel, tokens: TokenTable, batches: list[np.ndarray], pad_id: int, device: torch.device, room: Room,
    bar: tqdm,
) -> dict[str, np.ndarray]:
    parts: dict[str, list[np.ndarray]] = {"rows": [], "features": [], "norms": [], "losses": []}
    for rows, samples, hidden, losses in run_batches(model, tokens, batches, pad_id, device, room):
        features, norms, mean_losses = gradient_proxies(samples, hidden, losses, len(rows))
        finite = torch.isfinite(features).all(dim=1) & torch.isfinite(mean_losses)
        if not finite.all():
            bad = [tokens.ids[r] for r in rows[~finite.cpu().numpy()]]
            raise ValueError(f"the model gives NaN or infinity on samples {', '.join(bad[:10])}: check its weights, dtype")
        parts["rows"].append(rows)
        parts["features"].append(features.half().cpu().numpy())
        parts["norms"].append(norms.float().cpu().numpy())
        parts["losses"].append(mean_losses.float().cpu().numpy())
        bar.update(int(tokens.num_tokens[rows].sum()))
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _write_shard(folder: Path, shard: int, arrays: dict[str, np.ndarray]) -> None:
    """The sidecar appears last, so a shard without one does not exist."""
    path = _shard(folder, shard)
    with commit_file(path) as part:
        save_file(arrays, part)
    write_json(_sidecar(folder, shard), {"hash": hash_files([path]), "rows": len(arrays["rows"])})


def _shard(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.safetensors"


def _sidecar(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.json"


class _threads:
    """A fixed number of CPU threads while the model runs: sums depend on how they are split."""

    def __init__(self, number: int, device: torch.device):
        self.number, self.before = number if device.type == "cpu" else torch.get_num_threads(), torch.get_num_threads()

    def __enter__(self) -> None:
        torch.set_num_threads(self.number)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self.before)


@torch.no_grad()
def _check_head(model: PreTrainedModel, tokens: TokenTable, device: torch.device) -> None:
    """Refuse models whose logits are more than head x hidden (scaled, capped): proxies would be wrong without a word."""
    middle = np.argsort(tokens.num_tokens, kind="stable")[len(tokens) // 2 :][:_CHECKED_ROWS]
    batch = {k: torch.from_numpy(v).to(device) for k, v in pad_batch([tokens[int(r)] for r in middle], 0).items()}
    samples, predictors, _ = supervised_positions(batch.pop("labels"))
    own = model(**batch, use_cache=False).logits[samples, predictors].float()
    head = model.get_output_embeddings()
    hidden = model.base_model(**batch, use_cache=False).last_hidden_state[samples, predictors]
    ours = torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None)).float()
    difference, largest = float((ours - own).abs().max()), float(own.abs().max())
    if difference > _LOGIT_TOLERANCE * largest:  # NaN passes here and is named by sample later
        raise ValueError(
            f"{type(model).__name__}: its logits differ by up to {difference:.3g} (the largest is {largest:.3g}) from "
            "hidden states x output embeddings: it scales or caps them, which gradient proxies do not support"
        )
