"""Stage 2: Record -> input ids and the mask of supervised tokens, in flat arrays on disk, cached by content.

Shapes: N samples, L tokens of all samples together.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .files import commit_folder, hash_files, is_committed, read_json, require_space, write_json
from .records import Record, content_hash
from .templates import Segment, Template, control_tokens, render

IGNORE_INDEX = -100
VERSION = 2  # part of the cache key: raise it when the tokens of an unchanged input would change


# What other templates leave in a text that was made with them before.
_LEFTOVERS = (
    "### Instruction:", "### Response:", "@@ Instruction", "@@ Response", "<|im_start|>", "<|im_end|>", "<|user|>",
    "<|assistant|>", "<|endoftext|>", "[INST]", "[/INST]", "<<SYS>>", "</s>", "{instruction}", "{input}",
)
_EXAMPLES = 5


@dataclass
class TokenReport:
    """What became of the records; examples are numbers of records, so that the report holds for any file of the content."""

    num_records: int = 0
    num_tokens: int = 0
    num_supervised: int = 0
    num_truncated: int = 0  # lost their end, EOS included
    num_unended: int = 0  # no end marker to learn although nothing was cut
    num_straddling: int = 0  # a token covers the border of prompt and answer; it is supervised
    unsupervised: list[int] = field(default_factory=list)  # excluded: no supervised token left
    refused: dict[str, list[int]] = field(default_factory=dict)  # excluded: why the template cannot hold them -> which
    num_marked: int = 0  # hold markers of a template as text
    marked: list[int] = field(default_factory=list)

    def lines(self, records: Sequence[Record], max_length: int) -> list[str]:
        """The audit as text, one finding a line."""

        def examples(numbers: list[int], count: int) -> str:
            places = ", ".join(records[n].place or records[n].id for n in numbers[:_EXAMPLES])
            return f"({places}{', ...' if count > _EXAMPLES else ''})"

        num_kept = self.num_records - len(self.unsupervised) - self.num_refused
        out = [
            f"audit: {self.num_supervised} of {self.num_tokens} tokens supervised "
            f"({self.num_supervised / max(self.num_tokens, 1):.1%}); {num_kept - self.num_truncated - self.num_unended} of "
            f"{num_kept} rows end with an end marker that is learnt"
        ]
        if self.num_truncated:
            out.append(f"{self.num_truncated} rows truncated to {max_length} tokens: their end is not learnt")
        if self.num_unended:
            out.append(f"{self.num_unended} rows have no end marker: the tokenizer has no EOS, so the model learns no end")
        if self.unsupervised:
            masked = len(self.unsupervised)
            out.append(
                f"{masked} rows excluded: no supervised token left after truncation to {max_length} "
                + examples(self.unsupervised, masked)
            )
        for kind, numbers in self.refused.items():
            out.append(f"{len(numbers)} bad rows: {kind} {examples(numbers, len(numbers))}")
        if self.num_straddling:
            out.append(f"{self.num_straddling} rows have a token across the border of prompt and answer (supervised)")
        if self.num_marked:
            out.append(
                f"{self.num_marked} rows hold markers of a template in their own text, tokenised as plain text; remove them "
                f"if they are left over {examples(self.marked, self.num_marked)}"
            )
        return out

    @property
    def num_refused(self) -> int:
        """Rows that the template cannot hold."""
        return sum(map(len, self.refused.values()))

    def require(self, *, max_bad_fraction: float, max_masked_fraction: float, max_length: int) -> None:
        """Refuse data of which the template cannot hold too many rows, or whose rows are mostly without anything to learn.

        Raises:
            ValueError: with the numbers and the remedy.
        """
        if self.num_refused > max_bad_fraction * self.num_records:
            kinds = "; ".join(f"{len(numbers)}: {kind}" for kind, numbers in self.refused.items())
            raise ValueError(
                f"{self.num_refused} of {self.num_records} rows do not fit the template, more than data.max_bad_fraction "
                f"{max_bad_fraction:g} allows ({kinds}): mend them, use another data.template, or raise the limit"
            )
        masked = len(self.unsupervised)
        if masked > max_masked_fraction * self.num_records:
            raise ValueError(
                f"{masked} of {self.num_records} rows have no supervised token within {max_length} tokens, more than "
                f"data.max_masked_fraction {max_masked_fraction:g} allows: raise data.max_length, or the limit"
            )


class TokenTable:
    """N tokenised samples; memory-mapped, so that every rank can hold the table for free.

    Attributes:
        ids: N sample ids.
        sources: N names, the source of each sample.
        num_tokens: int64 [N].
        num_supervised: int64 [N], labels that the model is asked to predict (the first position has no predecessor).
        notes: what reading and tokenising found, one finding a line; empty where nobody read.
    """

    def __init__(self, folder: Path, notes: Sequence[str] = ()):
        """Open a finished folder."""
        self.folder = folder
        meta = read_json(folder / "manifest.json")
        self.key: str = meta["key"]
        self.data_hash: str = meta["data_hash"]
        self.report = TokenReport(**meta["report"])
        self.ids: list[str] = (folder / "ids.txt").read_text().split()
        sources = read_json(folder / "sources.json")
        self.sources: list[str] = sources if len(sources) == len(self.ids) else sources * len(self.ids)
        self.input_ids = np.load(folder / "input_ids.npy", mmap_mode="r")  # int32 [L]
        self.supervised = np.load(folder / "supervised.npy", mmap_mode="r")  # bool [L]
        self.offsets = np.load(folder / "offsets.npy")  # int64 [N + 1]
        self.num_tokens = np.diff(self.offsets)
        first = self.supervised[self.offsets[:-1]]
        self.notes = list(notes)
        self.num_supervised = np.add.reduceat(self.supervised, self.offsets[:-1], dtype=np.int64) - first

    def __len__(self) -> int:
        """N."""
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One sample: id, input_ids int64 [T] and labels int64 [T] with IGNORE_INDEX outside the loss."""
        span = slice(self.offsets[index], self.offsets[index + 1])
        input_ids = self.input_ids[span].astype(np.int64)
        labels = np.where(self.supervised[span], input_ids, IGNORE_INDEX)
        return {"id": self.ids[index], "input_ids": input_ids, "labels": labels}


def tokenizer_hash(tokenizer: Any) -> str:
    """Content hash of a fast tokenizer: vocabulary, merges, normaliser and special tokens, not its class name."""
    special = json.dumps({k: str(v) for k, v in sorted(tokenizer.special_tokens_map.items())})
    return _hash(tokenizer.backend_tokenizer.to_str(), special)


def token_key(records: list[Record], template: Template, tokenizer: Any, max_length: int) -> str:
    """Hash of everything that decides the tokens."""
    text = [content_hash(records), template.name, template.fingerprint, tokenizer_hash(tokenizer)]
    return _hash(*text, str(max_length), str(VERSION))


@dataclass(frozen=True)
class Tokenized:
    """Token ids and mask of one record; `truncated`: lost its end; `ended`: an end marker is learnt."""

    ids: list[int]
    supervised: list[bool]
    truncated: bool
    straddles: bool
    ended: bool


def tokenize_sample(record: Record, template: Template, tokenizer: Any, max_length: int) -> Tokenized:
    """Token ids and mask of one record.

    BOS (where the tokenizer has one) stands first exactly once, EOS closes the last answer and is learnt; truncation is
    on the right, as in the training code of Magicoder and AlpaCare, so a truncated row loses its EOS.
    """
    segments = render(template, record.turns, record.context, tokenizer)
    straddles = False
    mixed = len({s.verbatim for s in segments}) > 1
    if template.joint and not mixed:
        ids, mask, straddles = _tokenize_joint(segments, tokenizer)
    if not template.joint or mixed or (straddles and template.name == "chat"):
        # In a chat the prompt's tokens must be those that generation will start from, so no token may cross the border.
        ids, mask, straddles = *_tokenize_apart(segments, tokenizer), False
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    if bos is not None and template.name != "chat" and ids[:1] != [bos]:
        ids, mask = [bos, *ids], [False, *mask]
    # Most chat templates close an answer with their own end marker; one that does not gets EOS like the others.
    closed = template.name == "chat" and any(i == eos and m for i, m in zip(ids, mask, strict=True))
    if eos is not None and not closed:
        ids, mask = [*ids, eos], [*mask, True]
    last = next((i for i, m in zip(reversed(ids), reversed(mask), strict=True) if m), None)
    truncated = len(ids) > max_length
    ended = not truncated and last in tokenizer.all_special_ids
    return Tokenized(ids[:max_length], mask[:max_length], truncated, straddles, ended)


def prompt_tokens(instruction: str, begun: str, template: Template, tokenizer: Any) -> list[int]:
    """Token ids that generation starts from.

    Args:
        instruction: one user turn, laid out as in training.
        begun: the beginning of the answer. It is tokenised together with the prompt, as Magicoder's evaluation does; in a
            chat apart from it, so that the prompt's tokens are those of training.
        template: of the training.
        tokenizer: of the model.
    """
    segments = render(template, (("user", instruction), ("assistant", "x")), "", tokenizer)
    prompt = list(itertools.takewhile(lambda s: not s.supervised, segments))
    if template.name == "chat":
        ids, _ = _tokenize_apart([*prompt, *([Segment(begun, True, True)] if begun else [])], tokenizer)
        return ids
    text = "".join(s.text for s in prompt) + begun
    ids = list(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])
    bos = tokenizer.bos_token_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def _tokenize_joint(segments: list[Segment], tokenizer: Any) -> tuple[list[int], list[bool], bool]:
    """Tokenise the whole text; a token is supervised if it covers any character of an answer."""
    encoded = tokenizer(
        "".join(s.text for s in segments), add_special_tokens=False, return_offsets_mapping=True,
        split_special_tokens=segments[0].verbatim,
    )
    in_loss = np.concatenate([np.full(len(s.text), s.supervised) for s in segments])
    pieces = [in_loss[start:end] for start, end in encoded["offset_mapping"]]
    straddles = any(piece.any() and not piece.all() for piece in pieces)
    return list(encoded["input_ids"]), [bool(piece.any()) for piece in pieces], straddles


def _tokenize_apart(segments: list[Segment], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Tokenise each segment alone, so that the mask follows by construction."""
    ids: list[int] = []
    mask: list[bool] = []
    for segment in segments:
        text = segment.text
        if text[0] in " \u2581" and _swallows_a_blank(tokenizer):
            text = " " + text
        piece = tokenizer(text, add_special_tokens=False, split_special_tokens=segment.verbatim)["input_ids"]
        ids += piece
        mask += [segment.supervised] * len(piece)
    return ids, mask


def _swallows_a_blank(tokenizer: Any) -> bool:
    """Whether a leading blank is lost, as in transformers 5's sentencepiece tokenizers, which take it for their prefix."""
    return tokenizer(" a", add_special_tokens=False)["input_ids"] == tokenizer("a", add_special_tokens=False)["input_ids"]


def build_tokens(
    records: list[Record], template: Template, tokenizer: Any, max_length: int, cache_dir: Path
) -> tuple[TokenTable, bool]:
    """Tokenise all records, or open the cached result.

    Returns:
        the table and whether it came from the cache.

    Raises:
        ValueError: if no row has a supervised token.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"{tokenizer.name_or_path}: a fast tokenizer is needed for exact masks")
    key = token_key(records, template, tokenizer, max_length)
    folder = cache_dir / "tokens" / key
    if is_committed(folder):
        if read_json(folder / "manifest.json")["hash"] != _table_hash(folder):
            raise ValueError(f"token cache {folder} is damaged: delete it and run the command again")
        return TokenTable(folder), True
    report = TokenReport(num_records=len(records))
    markers = {*_LEFTOVERS, *control_tokens(tokenizer)}
    ids: list[str] = []
    sources: list[str] = []
    chunks: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for number, record in enumerate(tqdm(records, desc="tokenising", unit="row", disable=None)):
        try:
            sample = tokenize_sample(record, template, tokenizer, max_length)
        except ValueError as error:
            report.refused.setdefault(str(error), []).append(number)
            continue
        if any(marker in text for text in (record.context, *(t for _, t in record.turns)) for marker in markers):
            report.num_marked += 1
            report.marked = [*report.marked, number][:_EXAMPLES]
        if not any(sample.supervised[1:]):
            report.unsupervised.append(number)
            continue
        report.num_truncated += sample.truncated
        report.num_unended += not (sample.ended or sample.truncated)
        report.num_straddling += sample.straddles
        report.num_tokens += len(sample.ids)
        report.num_supervised += sum(sample.supervised[1:])
        ids.append(record.id)
        sources.append(record.source)
        chunks.append(np.asarray(sample.ids, dtype=np.int32))
        masks.append(np.asarray(sample.supervised, dtype=bool))
    if not ids and report.refused:
        kinds = "; ".join(f"{len(numbers)}: {kind}" for kind, numbers in report.refused.items())
        raise ValueError(f"none of {len(records)} rows fits the template ({kinds}): use another data.template")
    if not ids:
        raise ValueError(
            f"no supervised token left in any of {len(records)} rows after truncation to data.max_length {max_length}: "
            "the prompts alone fill the window; raise data.max_length"
        )
    meta: dict[str, Any] = {"key": key, "data_hash": content_hash(records), "report": asdict(report), "version": VERSION}
    require_space(cache_dir, 5 * report.num_tokens + sum(map(len, ids)) + 16 * len(ids), "the token cache")
    with commit_folder(folder, meta) as part:
        (part / "ids.txt").write_text("\n".join(ids))
        write_json(part / "sources.json", sources if len(set(sources)) > 1 else sources[:1])
        np.save(part / "input_ids.npy", np.concatenate(chunks))
        np.save(part / "supervised.npy", np.concatenate(masks))
        np.save(part / "offsets.npy", np.concatenate([[0], np.cumsum([len(c) for c in chunks])]).astype(np.int64))
        meta["hash"] = _table_hash(part)
    return TokenTable(folder), False


def _table_hash(folder: Path) -> str:
    return hash_files([*folder.glob("*.npy"), folder / "ids.txt", folder / "sources.json"])


def _hash(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


def pad_batch(samples: Iterable[dict[str, Any]], pad_id: int) -> dict[str, np.ndarray]:
    """Right-pad samples to a [B, T] batch; padding is told from data by position, never by token id."""
    samples = list(samples)
    shape = (len(samples), max(len(s["input_ids"]) for s in samples))
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    for row, sample in enumerate(samples):
        length = len(sample["input_ids"])
        input_ids[row, :length] = sample["input_ids"]
        labels[row, :length] = sample["labels"]
        attention_mask[row, :length] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}


def pack_batch(samples: Iterable[dict[str, Any]], lines: np.ndarray, pad_id: int) -> dict[str, np.ndarray]:
    """Lay samples end to end in lines [P, T]; positions begin anew with each, so that attention stays inside.

    Args:
        samples: n of them.
        lines: int64 [n], the line of each.
        pad_id: fills what is left of a line, whose positions make a sample of their own.
    Returns:
        "input_ids", "labels", "position_ids" int64 [P, T]; "sample" int64 [P, T], whose number each token is (0 in padding).
        No token is asked of the sample before it.
    """
    samples = list(samples)
    lengths = np.array([len(s["input_ids"]) for s in samples])
    ends = np.bincount(lines, lengths).astype(np.int64)
    shape = (len(ends), int(ends.max()))
    input_ids, labels = np.full(shape, pad_id, dtype=np.int64), np.full(shape, IGNORE_INDEX, dtype=np.int64)
    positions, owner = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    filled = np.zeros(len(ends), dtype=np.int64)
    for number, (sample, line, length) in enumerate(zip(samples, lines, lengths, strict=True)):
        here = slice(filled[line], filled[line] + length)
        input_ids[line, here], owner[line, here], positions[line, here] = sample["input_ids"], number, np.arange(length)
        labels[line, here] = sample["labels"]
        labels[line, here.start] = IGNORE_INDEX
        filled[line] += length
    for line, end in enumerate(ends):
        positions[line, end:] = np.arange(shape[1] - end)
    return {"input_ids": input_ids, "labels": labels, "position_ids": positions, "sample": owner}
