"""Stage 0: the typed, checked Recipe; a YAML file holds what differs from the defaults below (`recipe_file` reads it)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, model_validator

from .allocation import Packing
from .selection import PlanSettings


class Section(BaseModel):
    """A strict section: no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class LoraSection(Section):
    """Low-rank adapters in place of all weights; the frozen model plus alpha / rank x B A on each target."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"  # endings of names


class ModelSection(Section):
    """The model that is both scored and trained."""

    name_or_path: str  # hub id, local folder, or embedded:NAME
    revision: str | None = None
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"  # the last falls back to sdpa, and says so
    lora: LoraSection | None = None  # train adapters; the export is merged


class _RowsSection(Section):
    """How the rows of a source are read."""

    revision: str | None = None  # of a hub data set
    split: str = "train"  # which files of a folder or hub data set
    subset: str | None = None  # of a hub data set whose card names several
    format: Literal[
        "auto", "alpaca", "oss_instruct", "instruction_response", "messages", "sharegpt", "prompt_completion"
    ] = "auto"
    columns: dict[str, str] = {}  # our field name -> the source's column name


class SourceSection(_RowsSection):
    """One source of a mixture."""

    path: str  # as data.path


class DataSection(_RowsSection):
    """Where the rows come from and how they become tokens: one source, or several under names."""

    path: str | None = None  # file (.json .jsonl .csv .tsv .parquet .arrow, also .gz), folder, glob, hub id, embedded:NAME
    sources: dict[str, SourceSection] = {}  # a mixture: name -> source; the name stays with every sample
    template: Literal["magicoder", "alpaca", "chat", "plain"]
    max_length: int = Field(ge=2)  # tokens
    max_bad_fraction: float = Field(0.01, ge=0, le=1)  # unreadable rows of a source that are still tolerated
    max_masked_fraction: float = Field(0.5, ge=0, le=1)  # rows with no supervised token that are still tolerated
    cache_dir: str | None = None  # default: the folder "cache" beside the run's folder

    @model_validator(mode="after")
    def _one_way(self) -> DataSection:
        if (self.path is None) == (not self.sources):
            raise ValueError("give either path, or sources: {name: {path: ...}, ...}")
        alone = [f for f in _RowsSection.model_fields if f in self.model_fields_set]
        if self.sources and alone:
            raise ValueError(f"{', '.join(alone)} belong into each of the sources {', '.join(self.sources)}")
        return self

    @property
    def all_sources(self) -> dict[str, SourceSection]:
        """The sources by name; a single one is called "data"."""
        if self.sources:
            return self.sources
        return {"data": SourceSection(**{f: getattr(self, f) for f in SourceSection.model_fields})}


class SelectionSection(Section):
    """CluSTER's knobs (arXiv 2609.12584, sections 4.1-4.3)."""

    num_clusters: int | Literal["world"] = 4  # "world" is the paper's K = number of GPUs
    alpha: float = Field(1.5, ge=1)  # |C_c| <= alpha N / K
    min_fraction: float = Field(0.0, ge=0, le=1)  # |C_c| >= min_fraction N / K
    choice: Literal["peripheral", "random", "core"] = "peripheral"
    balance: Literal["whole", "random_first"] = "whole"
    quota: Literal["equal", "proportional", "neyman"] = "equal"  # how many each cluster keeps; the last two are ours
    ratio: float | None = Field(None, gt=0, le=1)  # r: as many in all as equal parts of r n_min give
    keep: float | None = Field(None, gt=0, le=1)  # or a budget as a share of all samples
    trim: float = Field(0.0, ge=0, lt=1)  # outermost share of every cluster that is not kept: broken rows live there
    weighting: Literal["cluster", "none", "calibrated"] = "cluster"
    min_effective: float = Field(0.8, gt=0, le=1)  # least effective sample size of the calibration, cluster weights apart
    dedup: bool = False  # leave near-duplicates out; they are reported anyway
    near_duplicate_cosine: float = Field(0.99, gt=0, le=1)  # of two proxies of one cluster
    redraw: Literal["none", "epoch"] = "none"  # with choice random: other samples in every epoch
    seed: int = Field(0, ge=0)
    num_restarts: int = Field(20, ge=1)
    tokens_per_batch: int = Field(16384, ge=1)  # padded tokens of one forward pass
    cpu_threads: int = Field(1, ge=1)  # per rank on CPU; one number for any W keeps proxies bit-equal

    @model_validator(mode="after")
    def _together(self) -> SelectionSection:
        if self.num_clusters != "world" and self.num_clusters < 1:
            raise ValueError(f"num_clusters is {self.num_clusters}: at least 1, or 'world'")
        PlanSettings(**{**self.plan_settings, "num_clusters": 1})
        return self

    @property
    def plan_settings(self) -> dict[str, Any]:
        """What `make_plan` takes of this section."""
        return self.model_dump(exclude={"tokens_per_batch", "cpu_threads"})


class TrainSection(Section):
    """Optimization; gradient_accumulation_steps is always derived."""

    epochs: int = Field(ge=1)
    global_batch_size: int = Field(ge=1)
    micro_batch_size: int = Field(ge=1)  # samples, padded to the longest; with packing times max_tokens a micro-batch
    packing: bool = False  # samples end to end instead of padding; the same losses and gradients
    max_tokens: int | None = Field(None, ge=1)  # of a pack; default: data.max_length
    tokens_per_micro_batch: int | None = Field(None, ge=1)  # whole packs; default: micro_batch_size x max_tokens
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    lr: float = Field(gt=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field([0.9, 0.999], min_length=2, max_length=2)
    eps: float = Field(1e-8, gt=0)
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: int | None = Field(None, ge=0)
    warmup_ratio: float | None = Field(None, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, ge=0)  # 0 switches clipping off
    precision: Literal["fp32", "bf16", "bf16_autocast", "pure_bf16"] = "bf16"
    gradient_checkpointing: bool = True
    normalization: Literal["sample_mean", "token_mean"] = "sample_mean"
    allocation: Literal["cluster", "tokens"] = "cluster"
    seed: int = Field(0, ge=0)
    tf32: bool = False  # fp32 matrix products on a GPU rounded to 10 bits of mantissa; bf16 ones are not concerned
    compile: bool = False  # each of the model's layers by torch.compile
    checkpoint_every: int = Field(100, ge=1)  # steps
    keep_checkpoints: int = Field(2, ge=1)  # the newest ones
    full_disk: Literal["stop", "go_on"] = "stop"  # where a checkpoint does not fit
    milestone_every: int | None = Field(None, ge=1)  # checkpoints of multiples of this step stay for good
    log_to: list[Literal["tensorboard", "wandb", "csv"]] = []  # besides log.jsonl, through DeepSpeed's monitor
    diagnose_every: int | None = Field(None, ge=1)  # steps: the ranks' gradients compared, see docs/training.md
    num_workers: int = Field(2, ge=0)  # data loader processes per rank
    max_nonfinite_steps: int = Field(0, ge=0)  # in a row whose gradient is not finite, left out by DeepSpeed
    hang_timeout_s: float = Field(1500.0, gt=0)  # without progress in training; the rank that is behind is then named
    export_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    @model_validator(mode="after")
    def _together(self) -> TrainSection:
        given = [k for k in ("max_tokens", "tokens_per_micro_batch") if getattr(self, k) is not None]
        if given and not self.packing:
            raise ValueError(f"{' and '.join(given)} given without packing: true")
        if self.milestone_every is not None and self.milestone_every % self.checkpoint_every:
            raise ValueError(
                f"milestone_every {self.milestone_every} is no multiple of checkpoint_every {self.checkpoint_every}: there "
                "would be no checkpoint to keep"
            )
        if self.warmup_steps is not None and self.warmup_ratio is not None:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_ratio ({self.warmup_ratio}): give one of them"
            )
        return self


class DeepSpeedSection(Section):
    """The ZeRO config that the recipe is paired with."""

    config: str = "zero2"  # a name from ds_configs/ or the path of a JSON file


class HardwareSection(Section):
    """What the recipe is written for; another number of ranks is a note, since the global batches stay the same."""

    ranks: int = Field(1, ge=1)  # GPUs, or processes of a recipe for the CPU
    gpu_memory_gb: float = Field(80.0, gt=0)  # of each; 1 GB is 1e9 bytes


class EvaluateSection(Section):
    """What is measured before and after training; benchmarks are run by eval/, never by training."""

    held_out: str | SourceSection | None = None  # a source as data.path, or one with its own settings
    held_out_split: str = "train"  # of a held_out that is a path
    held_out_sources: dict[str, SourceSection] = {}  # or several under names, whose losses a comparison tells apart
    max_samples: int = Field(256, ge=1)  # of each source
    every: int | None = Field(None, ge=1)  # steps: the held-out loss in training as well
    keep_best: bool = False  # the checkpoint with the least of them stays, and is exported
    patience: int | None = Field(None, ge=1)  # training ends after this many of them in a row without a new least
    benchmarks: list[Literal["humaneval", "mbpp", "medqa"]] = []  # whose data the job needs; run by eval/, not by training


class IfdSection(Section):
    """Instruction-following difficulty (Cherry LLM, Superfiltering)."""

    ratio: Literal["loss", "perplexity"] = "loss"  # Cherry's, or Superfiltering's: another order of the same rows under 1
    pre_experience: bool = False  # Cherry's first version: score with a model that has learnt 1,000 varied rows


class LessSection(Section):
    """Influence on validation rows through gradients of adapters (LESS)."""

    lora: LoraSection = LoraSection(
        rank=128, alpha=512.0, dropout=0.1, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    warmup_fraction: float = Field(0.05, gt=0, le=1)  # of the samples, at least one global batch
    warmup_epochs: int = Field(4, ge=1)  # a checkpoint behind each
    lr: float = Field(2e-5, gt=0)
    global_batch_size: int | None = Field(None, ge=1)  # default: the recipe's; its authors' 128
    projection_dim: int = Field(8192, ge=64, multiple_of=64)
    validation: dict[str, SourceSection] = {}  # a subtask each; default: the validation half of the held-out rows
    max_validation: int = Field(64, ge=1)  # rows of each subtask

    @model_validator(mode="after")
    def _no_test_rows(self) -> LessSection:
        for name, source in self.validation.items():
            if "test" in source.split.lower():
                raise ValueError(
                    f"baselines.less.validation.{name} reads split {source.split}: selecting by test rows would make their "
                    "scores worthless; name a validation or training split"
                )
        return self


class S2lSection(Section):
    """Training trajectories of a small model (S2L)."""

    model: ModelSection | None = None  # the small one
    epochs: int = Field(3, ge=1)
    snapshots: int = Field(12, ge=1)  # at most, evenly spread over the steps
    num_clusters: int = Field(100, ge=1)
    lr: float = Field(2e-5, gt=0)
    global_batch_size: int | None = Field(None, ge=1)  # default: the recipe's; its authors' 128


class BaselinesSection(Section):
    """What launch/compare.py compares with; cluster_ds/baselines/ says where their authors' papers and code differ."""

    ifd: IfdSection = IfdSection()
    less: LessSection = LessSection()
    s2l: S2lSection = S2lSection()


class Recipe(Section):
    """Everything that defines a run."""

    name: str
    description: str = ""
    model: ModelSection
    data: DataSection
    selection: SelectionSection = SelectionSection()
    train: TrainSection
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    hardware: HardwareSection = HardwareSection()
    evaluate: EvaluateSection = EvaluateSection()
    baselines: BaselinesSection = BaselinesSection()

    @model_validator(mode="after")
    def _held_out_is_there(self) -> Recipe:
        e, every = self.evaluate, self.evaluate.every
        if every is None and (e.keep_best or e.patience is not None):
            raise ValueError("evaluate.keep_best and evaluate.patience need evaluate.every, the steps between evaluations")
        if e.held_out is not None and e.held_out_sources:
            raise ValueError("give either evaluate.held_out, or evaluate.held_out_sources: {name: {path: ...}, ...}")
        if every is not None and not self.held_out:
            raise ValueError(f"evaluate.every {every} without evaluate.held_out: name the held-out rows")
        if every is not None and e.keep_best and every % self.train.checkpoint_every:
            raise ValueError(
                f"evaluate.keep_best: evaluate.every {every} is no multiple of train.checkpoint_every "
                f"{self.train.checkpoint_every}, so the best step would have no checkpoint: change one of them"
            )
        return self

    @model_validator(mode="after")
    def _packs_hold_samples(self) -> Recipe:
        if self.packing is not None and self.packing.max_tokens < self.data.max_length:
            raise ValueError(
                f"packs of train.max_tokens {self.packing.max_tokens} are shorter than samples of data.max_length "
                f"{self.data.max_length} may be: raise the one or lower the other"
            )
        return self

    @property
    def packing(self) -> Packing | None:
        """How training packs samples, or None."""
        t = self.train
        if not t.packing:
            return None
        max_tokens = t.max_tokens or self.data.max_length
        return Packing(max_tokens, t.tokens_per_micro_batch or t.micro_batch_size * max_tokens)

    @property
    def tokens_per_micro_batch(self) -> int:
        """At most, padding included."""
        return self.packing.tokens_per_micro_batch if self.packing else self.train.micro_batch_size * self.data.max_length

    @property
    def smaller_micro_batch(self) -> str | None:
        """What to lower where memory is short, from what to what, the result staying the same; None if it is least."""
        packing, size = self.packing, self.train.micro_batch_size
        if packing is None:
            return f"train.micro_batch_size from {size} to {size // 2}" if size > 1 else None
        packs = packing.packs_per_micro_batch
        now, then = packing.tokens_per_micro_batch, packs // 2 * packing.max_tokens
        return f"train.tokens_per_micro_batch from {now} to {then}" if packs > 1 else None

    @property
    def held_out(self) -> dict[str, SourceSection]:
        """The held-out rows by name; where only a path is given, a single training source says how they are read as well."""
        held_out = self.evaluate.held_out
        if held_out is None:
            return self.evaluate.held_out_sources
        if isinstance(held_out, SourceSection):
            return {"data": held_out}
        fields = [] if self.data.sources else ["format", "columns"]
        fields += ["revision", "subset"] if held_out == self.data.path else []
        like = {field: getattr(self.data, field) for field in fields}
        return {"data": SourceSection(**{**like, "path": held_out, "split": self.evaluate.held_out_split})}

    def to_yaml(self) -> str:
        """The resolved recipe, defaults included, as it is saved with the run; it can be loaded again."""
        values = self.model_dump()
        for field in ("path", *_RowsSection.model_fields) if self.data.sources else ():  # they belong to the sources
            del values["data"][field]
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
