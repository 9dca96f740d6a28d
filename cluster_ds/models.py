"""Loading the model and tokenizer that a recipe names, and hashing what was loaded."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentencepiece import SentencePieceProcessor
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import is_flash_attn_2_available

from .embedded import resolve_model
from .files import hash_files
from .hub import MODEL_FILES, OLD_MODEL_FILES, download
from .recipe import ModelSection
from .tokens import TokenTable

_PROBES = ("def f(x):\n    return [x,\n        1]\n", "Fine, thanks.  Two blanks, été, 12.")
_WEIGHTS = ("*.safetensors", "*.bin", "config.json")


def model_folder(section: ModelSection) -> Path:
    """The model's folder on this machine; downloads or makes it if need be. Call on rank 0 first.

    Raises:
        ValueError: naming what is missing and where to get it.
    """
    name = os.path.expanduser(resolve_model(section.name_or_path))
    if Path(name).is_dir():
        for needed in ("config.json", "*.safetensors or *.bin"):
            if not any(path for pattern in needed.split(" or ") for path in Path(name).glob(pattern)):
                raise ValueError(f"model folder {name} has no {needed}")
        return Path(name)
    if name.startswith((".", "/", "~")):
        raise ValueError(f"model folder {name} does not exist")
    return download_model(section)


def download_model(section: ModelSection, local_only: bool = False) -> Path:
    """A hub model's folder in the hub's cache; old repositories have .bin files instead of safetensors."""
    get = partial(download, "model", section.name_or_path, section.revision, local_only=local_only)
    folder = get(MODEL_FILES)
    if not any(folder.glob("*.safetensors")):
        folder = get(OLD_MODEL_FILES)
    for needed in ("config.json", "tokenizer*"):
        if not any(folder.glob(needed)):
            raise ValueError(f"{section.name_or_path} has no {needed} in {folder}: it is no whole causal language model")
    return folder


def model_hash(folder: Path) -> str:
    """Content hash of weights and configuration."""
    files = [path for pattern in _WEIGHTS for path in folder.glob(pattern)]
    return hash_files(files)


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer; one that is only a sentencepiece model gets its merges in the order of their scores.

    transformers 5.24 orders them by piece number instead, which splits the indentation of code otherwise than the model
    has learnt it: a line break and "    return" would become four blanks and "return" instead of three and "▁return".
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    file = folder / "tokenizer.model"
    if file.is_file() and not (folder / "tokenizer.json").is_file() and _is_sentencepiece_bpe(tokenizer):
        processor = SentencePieceProcessor(str(file))
        tokenizer.backend_tokenizer.model = BPE(
            tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False), _merges(processor),
            unk_token=tokenizer.unk_token, fuse_unk=True, byte_fallback=True,
        )
    return tokenizer


def sentencepiece_differences(folder: Path, tokenizer: Any) -> list[str]:
    """Texts that a tokenizer splits otherwise than the sentencepiece model beside it, as warnings; none is right."""
    file = folder / "tokenizer.model"
    if not file.is_file() or not _is_sentencepiece_bpe(tokenizer):
        return []
    processor = SentencePieceProcessor(str(file))
    out = []
    for text in _PROBES:
        ours = tokenizer(text, add_special_tokens=False)["input_ids"]
        if ours != processor.encode(text):
            out.append(
                f"warning: the tokenizer splits {text!r} into {tokenizer.convert_ids_to_tokens(ours)}, the sentencepiece "
                f"model {file} into {processor.encode(text, out_type=str)}: what the base model has learnt is the latter"
            )
    return out


def _is_sentencepiece_bpe(tokenizer: Any) -> bool:
    model = tokenizer.backend_tokenizer.model
    return isinstance(model, BPE) and model.byte_fallback  # tiktoken files bear the same name


def _merges(processor: SentencePieceProcessor) -> list[tuple[str, str]]:
    """Every way to put a piece together, best score first, as sentencepiece merges."""
    pieces = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    found = []
    for piece, number in pieces.items():
        score = processor.get_score(number)
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                found.append((-score, -len(left), -len(right), pieces[left], pieces[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


def text_config(folder: Path) -> Any:
    """The language model's part of the configuration."""
    return AutoConfig.from_pretrained(folder).get_text_config()


def require_vocabulary(folder: Path, tokens: TokenTable) -> None:
    """Refuse token ids that the model has no embedding for: a tokenizer that was extended while the model was not.

    Raises:
        ValueError: with both numbers.
    """
    size = text_config(folder).vocab_size
    largest = int(tokens.input_ids.max())
    if largest >= size:
        raise ValueError(
            f"the tokenizer gives token id {largest}, but {folder} has embeddings for {size}: resize the model "
            f"(model.resize_token_embeddings({largest + 1}), then save_pretrained), or use the tokenizer it came with"
        )


def pad_token_id(tokenizer: Any) -> int:
    """A valid id to fill padding with; what it is does not matter, since padding is masked by position."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, 0)
    return next(i for i in candidates if i is not None)


def attention_of(section: ModelSection) -> str:
    """The attention that the section names, or sdpa where flash-attention cannot run."""
    name = section.attn_implementation
    return "sdpa" if name == "flash_attention_2" and not is_flash_attn_2_available() else name


def load_model(folder: Path, section: ModelSection, dtype: torch.dtype, device: torch.device | None) -> PreTrainedModel:
    """The causal language model in `dtype`, straight onto `device` (None leaves placement to DeepSpeed)."""
    placement = {} if device is None else {"device_map": {"": device}}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention_of(section), **placement)


def compile_layers(model: PreTrainedModel) -> None:
    """Have torch compile each of the model's layers at its first use, for any length; what lies between stays as it is.

    Raises:
        ValueError: if the model is not made of transformers' layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"train.compile: {type(model).__name__} has no layers of transformers' kind: set it to false")
    for layer in layers:
        layer.compile(dynamic=True)
