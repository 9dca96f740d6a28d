"""Stage 13e: whether a run's folder holds this very run, and from which step it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .checkpoint import Found, set_aside_later
from .distributed import Ranks
from .ds_config import zero_stage
from .estimate import batch_text
from .files import is_committed, read_json
from .plan import Plan
from .recipe import Recipe

# What may change between two starts of one run: none of it changes what is learnt.
FREE_TO_CHANGE = {
    "micro_batch_size", "packing", "max_tokens", "tokens_per_micro_batch", "gradient_checkpointing",
    "num_workers", "checkpoint_every", "keep_checkpoints", "milestone_every", "export_dtype",
    "hang_timeout_s", "max_nonfinite_steps", "full_disk", "log_to", "diagnose_every", "tf32", "compile",
}


def identity_of(recipe: Recipe, plan: Plan, config: dict[str, Any]) -> dict[str, Any]:
    """What makes two runs the same run; compared on resume."""
    train = {k: v for k, v in recipe.train.model_dump().items() if k not in FREE_TO_CHANGE}
    lora = recipe.model.lora and recipe.model.lora.model_dump()
    model = plan.manifest["provenance"].get("model")
    return {**train, "plan": plan.hash, "model": model, "lora": lora, "zero_stage": zero_stage(config)}


def finished_steps(model_folder: Path, exported: dict[str, Any]) -> int | None:
    """Steps of the finished run whose model lies here; None if there is none, or it is another's."""
    if not is_committed(model_folder):
        return None
    manifest = read_json(model_folder / "manifest.json")
    same = all(manifest.get(k) == exported.get(k) for k in {*exported, "evaluate"})
    return manifest.get("steps_done", exported["num_steps"]) if same else None


def resume_step(
    output_dir: Path, identity: dict[str, Any], recipe: Recipe, ranks: Ranks, found: Found, wanted: bool
) -> int:
    """Steps that a whole checkpoint of this very run has done; 0 to begin."""
    folder = output_dir / "checkpoints"
    ranks.print(*(f"[train] {note}" for note in found.notes))
    if found.step is None:
        if is_committed(output_dir / "model"):
            raise ValueError(
                f"{output_dir / 'model'} was made by another run and there is no checkpoint to continue: choose another "
                "--output_dir, or delete it"
            )
        ranks.print("[train] no checkpoint, starting at step 0")
        return 0
    manifest = read_json(folder / f"step-{found.step:08d}" / "manifest.json")
    then = manifest["identity"]
    different = [f"{k}: then {then.get(k)!r}, now {v!r}" for k, v in identity.items() if then.get(k) != v]
    if different:
        raise ValueError(
            f"{folder} belongs to another run:\n  "
            + "\n  ".join(different)
            + "\nset these back, or choose another --output_dir"
        )
    for later in set_aside_later(folder, found.step) if wanted else []:
        ranks.print(f"[train] {later.name} holds what this run will no longer lead to: kept, but passed over")
    now = batch_text(recipe, ranks.world_size)
    if manifest["batches"] != now:
        ranks.print(f"[train] until then {manifest['batches']}; now {now}; the global batches stay the same")
    ranks.print(f"[train] resuming behind step {found.step}")
    return found.step
