"""DeepSpeed's config: what ds_configs/ says about ZeRO merged with what the recipe owns, stated in full.

Facts behind the rules were checked on DeepSpeed 0.19.8: its gradient_clipping defaults to 1.0, Adafactor's factored
statistics are destroyed by ZeRO's flat shards, stage 0 with bf16 cannot accumulate in fp32.
"""

from __future__ import annotations

import copy
import difflib
import json
from pathlib import Path
from typing import Any

from .allocation import accumulation_steps
from .recipe import TrainSection

CONFIGS_DIR = Path(__file__).resolve().parent.parent / "ds_configs"
_OURS_IN_FILE = (
    "zero_optimization", "communication_data_type", "data_types", "activation_checkpointing", "aio", "checkpoint",
    "comms_logger", "csv_monitor", "flops_profiler", "memory_breakdown", "steps_per_print", "tensorboard", "wandb",
    "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
)
_RECIPE_OWNS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "torch_autocast",
)


def find_config(name_or_path: str) -> Path:
    """The JSON file of a config's name or path.

    Raises:
        ValueError: naming the shipped ones.
    """
    for path in (CONFIGS_DIR / f"{name_or_path}.json", Path(name_or_path)):
        if path.is_file():
            return path
    names = sorted(p.stem for p in CONFIGS_DIR.glob("*.json"))
    raise ValueError(f"no DeepSpeed config {name_or_path!r}: give a path or one of {', '.join(names)}")


def read_config(path: Path) -> dict[str, Any]:
    """What a config file states; "auto" states nothing.

    Raises:
        ValueError: if it is not one JSON object.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold one JSON object")
    return {key: value for key, value in config.items() if value != "auto"}


def resolve_config(name_or_path: str, train: TrainSection, dp_world_size: int) -> dict[str, Any]:
    """The complete config for `deepspeed.initialize`.

    Args:
        name_or_path: of the ZeRO config.
        train: the recipe's section.
        dp_world_size: W.
    Raises:
        ValueError: for unknown keys, a key that both own with different values, an optimizer that the ZeRO stage would
            break, or batch sizes that do not divide.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # seconds, for what lists recipes

    path = find_config(name_or_path)
    config = read_config(path)
    zero = config.get("zero_optimization", {})
    try:
        DeepSpeedZeroConfig(**zero)
    except ValueError as error:
        raise ValueError(f"{path}: zero_optimization: {error}") from None
    if "offload_optimizer" in zero:  # our optimizers are torch's; DeepSpeed insists on its own unless told
        config.setdefault("zero_force_ds_cpu_optimizer", False)
    owned: dict[str, Any] = {
        "train_batch_size": train.global_batch_size,
        "gradient_clipping": train.max_grad_norm,
    }
    if not train.packing:
        size = train.micro_batch_size
        accumulation = accumulation_steps(train.global_batch_size, size, dp_world_size)
        owned |= {"train_micro_batch_size_per_gpu": size, "gradient_accumulation_steps": accumulation}
    if train.precision == "bf16":
        owned["bf16"] = {"enabled": True}
    elif train.precision == "bf16_autocast":
        owned["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    stage = zero.get("stage", 0)
    if stage == 0 and train.precision == "bf16":
        types = config.setdefault("data_types", {"grad_accum_dtype": "bf16"})
        if types.get("grad_accum_dtype", "bf16") != "bf16":
            raise ValueError(
                f"{path}: DeepSpeed cannot accumulate in {types['grad_accum_dtype']} at stage 0 with bf16: use stage 1 or "
                "2, or train.precision bf16_autocast"
            )
    _check_keys(path, config, owned)
    _check_stage(path, stage, train)
    return {
        "steps_per_print": None, "wall_clock_breakdown": False, **config, **owned,
        "zero_optimization": {"stage": 0, **zero},
    }


def with_batch_arithmetic(config: dict[str, Any], dp_world_size: int, packed: bool = False) -> dict[str, Any]:
    """A library user's config with its batch sizes and clipping stated.

    With packing the number of micro-batches differs from step to step and our engine states the boundary; what DeepSpeed is
    told then is that several are accumulated, and no size: its own count of samples means nothing.

    Raises:
        ValueError: if train_batch_size or train_micro_batch_size_per_gpu is missing, or the three sizes contradict.
    """
    config = copy.deepcopy(config)
    sizes = ("train_batch_size",) if packed else ("train_batch_size", "train_micro_batch_size_per_gpu")
    missing = [k for k in sizes if not isinstance(config.get(k), int)]
    if missing:
        raise ValueError(f"the DeepSpeed config must state {' and '.join(missing)}: accumulation is derived from them")
    if config.get("managed_gradient_accumulation") is False:
        raise ValueError("managed_gradient_accumulation is false: our engine states where a step ends, remove it")
    config.setdefault("gradient_clipping", 1.0)  # DeepSpeed 0.19.8's own default, said aloud
    if packed:
        given = [k for k in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps") if k in config]
        if given:
            raise ValueError(f"{' and '.join(given)} given with packing, where steps differ in them: remove them")
        several = {
            "train_batch_size": 2 * dp_world_size, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2
        }
        return config | several
    derived = accumulation_steps(config["train_batch_size"], config["train_micro_batch_size_per_gpu"], dp_world_size)
    stated = config.setdefault("gradient_accumulation_steps", derived)
    if stated != derived:
        raise ValueError(
            f"gradient_accumulation_steps {stated} contradicts train_batch_size {config['train_batch_size']} with "
            f"micro-batches of {config['train_micro_batch_size_per_gpu']} on {dp_world_size} ranks, which make {derived}"
        )
    return config


def zero_stage(config: dict[str, Any]) -> int:
    """The ZeRO stage of a config."""
    return int(config.get("zero_optimization", {}).get("stage", 0))


def _check_keys(path: Path, config: dict[str, Any], owned: dict[str, Any]) -> None:
    for key, value in config.items():
        if key in ("optimizer", "scheduler"):
            raise ValueError(f"{path}: {key} belongs to the recipe (train.{key}), remove it here")
        if key in owned and value != owned[key]:
            raise ValueError(f"{path}: {key} is {value!r}, but the recipe makes it {owned[key]!r}: remove it here")
        if key in _RECIPE_OWNS and key not in owned and value != {"enabled": False}:
            raise ValueError(f"{path}: {key} is {value!r}, which the recipe's train section does not use: remove it here")
        if key not in _OURS_IN_FILE and key not in _RECIPE_OWNS:
            near = difflib.get_close_matches(key, [*_OURS_IN_FILE, *_RECIPE_OWNS], n=1, cutoff=0.0)[0]
            raise ValueError(f"{path}: unknown key {key}; did you mean {near}?")


def _check_stage(path: Path, stage: int, train: TrainSection) -> None:
    if train.optimizer == "adafactor" and stage > 0:
        raise ValueError(
            f"{path}: Adafactor at ZeRO stage {stage} is not Adafactor: stages 1-3 give it flat shards, which have no rows "
            "and columns to factor (updates are off by half); use deepspeed.config zero0, or train.optimizer adamw"
        )
    if train.precision == "pure_bf16" and stage > 0:
        raise ValueError(f"{path}: precision pure_bf16 has no fp32 master weights to shard: use stage 0 or precision bf16")
