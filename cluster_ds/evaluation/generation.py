"""Problems -> answers of a model in samples.jsonl: greedy, batched by length, on every GPU, kept across interruptions."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from ..files import write_text
from ..memory import is_out_of_memory
from ..messages import Progress, quiet_libraries
from ..models import load_tokenizer, model_hash, pad_token_id, text_config
from ..templates import get_template
from ..tokens import prompt_tokens, tokenizer_hash
from .problems import Problems, cut, prompt_of
from .results import require_same
from .workers import run_parallel

SAMPLES, SETTINGS = "samples.jsonl", "generation.json"
_FENCE_TOKENS = 8  # enough of a row's end to hold a closing fence


@dataclass(frozen=True)
class GenerationConfig:
    """How answers are generated; they are always greedy.

    Attributes:
        template: layout of the prompt, as in training.
        max_new_tokens: of an answer.
        batch_size: prompts of one forward pass; another one changes a few answers in bf16.
        dtype: of the weights; "auto" is the one they are stored in.
        num_workers: processes; None is one for each visible GPU, or one on the CPU.
    """

    template: str
    max_new_tokens: int = 512
    batch_size: int = 16
    dtype: str = "auto"
    num_workers: int | None = None


Batch = list[tuple[str, list[int]]]  # task ids and their prompts


def generate(problems: Problems, model: Path, config: GenerationConfig, output_dir: Path) -> float:
    """Answer every problem that `output_dir`/samples.jsonl does not answer yet.

    Returns:
        seconds spent.
    Raises:
        ValueError: if the answers there are another model's or were made with other settings, or a prompt does not fit.
    """
    started = time.perf_counter()
    tokenizer = load_tokenizer(model)
    template = get_template(config.template, tokenizer)
    settings = {
        **{k: v for k, v in asdict(config).items() if k != "num_workers"}, "benchmark": problems.benchmark,
        "model_hash": model_hash(model), "tokenizer_hash": tokenizer_hash(tokenizer),
        "template_text": template.fingerprint, "problems_md5": problems.md5, "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    samples = output_dir / SAMPLES
    done = _resume(samples, output_dir / SETTINGS, settings)
    prompts = {
        task: prompt_tokens(*prompt_of(problems.benchmark, problem), template, tokenizer)
        for task, problem in problems.by_id.items()
    }
    _require_window(prompts, config.max_new_tokens, text_config(model))
    batches = _cut_batches(prompts, config.batch_size, done)
    missing = sum(map(len, batches))
    print(f"[generate] {len(prompts) - missing} of {len(prompts)} problems are answered in {samples}", flush=True)
    if missing:
        with samples.open("a", encoding="utf-8") as file:
            progress = Progress("generate", missing, "problems")
            for answers in run_parallel(_answer, (str(model), config), batches, config.num_workers):
                lines = [json.dumps(_sample(problems, task, *answer)) + "\n" for task, *answer in answers]
                file.write("".join(lines))
                file.flush()
                os.fsync(file.fileno())
                progress.add(len(lines))
    return time.perf_counter() - started


def read_samples(path: Path) -> dict[str, dict[str, Any]]:
    """Samples by task id; a line that a killed run was writing is passed over."""
    samples = {}
    for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else []:
        try:
            sample = json.loads(line)
        except json.JSONDecodeError:
            continue
        samples[sample["task_id"]] = sample
    return samples


def _sample(problems: Problems, task: str, text: str, finished: bool) -> dict[str, Any]:
    """A line as EvalPlus reads it; `finished`: the answer ended by itself within max_new_tokens."""
    body = cut(text)
    kind = "completion" if problems.benchmark == "humaneval" else "solution"
    return {"task_id": task, kind: body, "finished": finished, "generated": text}


def _resume(samples: Path, settings_file: Path, settings: dict[str, Any]) -> set[str]:
    samples.parent.mkdir(parents=True, exist_ok=True)
    found = read_samples(samples)
    if found and not settings_file.is_file():
        raise ValueError(f"{samples} is there without {settings_file.name}, so it is not ours: choose another --output_dir")
    require_same(settings_file, settings, started=bool(found))
    if found:
        write_text(samples, "".join(json.dumps(sample) + "\n" for sample in found.values()))
    return set(found)


def _require_window(prompts: dict[str, list[int]], max_new_tokens: int, config: Any) -> None:
    window = getattr(config, "max_position_embeddings", None)
    longest = max(prompts, key=lambda task: len(prompts[task]))
    if window is not None and len(prompts[longest]) + max_new_tokens > window:
        raise ValueError(
            f"{longest} has a prompt of {len(prompts[longest])} tokens and --max_new_tokens is {max_new_tokens}, more than "
            f"the model's {window} positions: lower --max_new_tokens"
        )


def _cut_batches(prompts: dict[str, list[int]], batch_size: int, done: set[str]) -> list[Batch]:
    """Batches of like lengths, the longest first; they are cut before what is done is left out, so they stay the same."""
    tasks = sorted(prompts, key=lambda task: (-len(prompts[task]), task))
    batches = [tasks[i : i + batch_size] for i in range(0, len(tasks), batch_size)]
    left = [[(task, prompts[task]) for task in batch if task not in done] for batch in batches]
    return [batch for batch in left if batch]


@torch.inference_mode()
def _answer(
    shared: tuple[str, GenerationConfig], batches: Sequence[Batch], device: torch.device
) -> Iterator[list[tuple[str, str, bool]]]:
    """Task id, text, and whether it ended by itself, of each prompt of each batch."""
    folder, config = shared
    quiet_libraries()
    tokenizer = load_tokenizer(Path(folder))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=config.dtype, device_map={"": device}
    )
    model.eval()
    pad = pad_token_id(tokenizer)
    ends = {tokenizer.eos_token_id, *_as_list(model.generation_config.eos_token_id)} - {None}
    greedy = transformers.GenerationConfig(
        do_sample=False, num_beams=1, max_new_tokens=config.max_new_tokens, pad_token_id=pad,
        eos_token_id=sorted(ends) or None, use_cache=True,
    )
    model.generation_config = greedy  # the folder's own may ask for sampling
    for batch in batches:
        width = max(len(ids) for _, ids in batch)
        input_ids = torch.full((len(batch), width), pad)
        mask = torch.zeros_like(input_ids)
        for row, (_, ids) in enumerate(batch):  # padded on the left
            input_ids[row, width - len(ids) :] = torch.tensor(ids)
            mask[row, width - len(ids) :] = 1
        try:
            out = model.generate(
                input_ids=input_ids.to(device), attention_mask=mask.to(device), generation_config=greedy,
                stopping_criteria=[_FenceClosed(tokenizer, width)],
            )
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise ValueError(
                f"out of memory: lower --batch_size from {config.batch_size}; what is answered is kept ({error})"
            ) from None
        new = out[:, width:].tolist()
        texts = [_until(row, ends) for row in new]
        decoded = tokenizer.batch_decode(texts, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        yield [
            (task, text, len(ids) < len(row) or "```" in text or len(row) < config.max_new_tokens)
            for (task, _), text, ids, row in zip(batch, decoded, texts, new, strict=True)
        ]


class _FenceClosed(transformers.StoppingCriteria):
    """Ends a row at its closing code fence: what follows would be cut off."""

    def __init__(self, tokenizer: Any, start: int):
        self.tokenizer, self.start = tokenizer, start

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        ends = input_ids[:, max(self.start, input_ids.shape[1] - _FENCE_TOKENS) :].tolist()
        closed = ["```" in text for text in self.tokenizer.batch_decode(ends)]
        return torch.tensor(closed, device=input_ids.device)


def _until(row: list[int], ends: set[int]) -> list[int]:
    stop = next((i for i, token in enumerate(row) if token in ends), len(row))
    return row[:stop]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
