import json

import pytest

from cluster_ds.ds_config import CONFIGS_DIR, resolve_config, with_batch_arithmetic, zero_stage
from cluster_ds.recipe import TrainSection


def train(**changes):
    base = {"epochs": 1, "global_batch_size": 64, "micro_batch_size": 4, "lr": 1e-5, "max_grad_norm": 0.0}
    return TrainSection(**{**base, **changes})


def file(tmp_path, config):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_everything_is_stated():
    config = resolve_config("zero2", train(), 4)
    assert config["gradient_accumulation_steps"] == 4 and config["train_batch_size"] == 64
    assert config["gradient_clipping"] == 0.0  # DeepSpeed would clip at 1.0 if the key were missing
    assert config["bf16"] == {"enabled": True} and config["data_types"]["grad_accum_dtype"] == "fp32"
    assert config["communication_data_type"] == "fp32" and zero_stage(config) == 2
    assert resolve_config("zero0", train(), 4)["data_types"] == {"grad_accum_dtype": "bf16"}
    assert resolve_config("zero0", train(precision="bf16_autocast"), 4)["torch_autocast"]["dtype"] == "bfloat16"
    assert "bf16" not in resolve_config("zero0", train(precision="pure_bf16"), 4)


@pytest.mark.parametrize("path", sorted(CONFIGS_DIR.glob("*.json")), ids=lambda p: p.stem)
def test_shipped_configs(path):
    assert resolve_config(path.stem, train(), 2)["train_batch_size"] == 64


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_adafactor_needs_stage_0(tmp_path, stage):
    path = file(tmp_path, {"zero_optimization": {"stage": stage}})
    with pytest.raises(ValueError, match=f"Adafactor at ZeRO stage {stage} is not Adafactor.*zero0"):
        resolve_config(path, train(optimizer="adafactor"), 4)
    assert resolve_config("zero0", train(optimizer="adafactor"), 4)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0, but the recipe makes it 0.0"),
        ({"train_batch_size": 32}, "train_batch_size is 32, but the recipe makes it 64"),
        ({"optimizer": {"type": "AdamW"}}, "optimizer belongs to the recipe"),
        ({"fp16": {"enabled": True}}, "fp16 is .* which the recipe's train section does not use"),
        ({"zero_optimisation": {"stage": 2}}, "unknown key zero_optimisation; did you mean zero_optimization"),
    ],
)
def test_two_owners_are_refused_naming_both(tmp_path, config, message):
    with pytest.raises(ValueError, match=message):
        resolve_config(file(tmp_path, config), train(), 4)


def test_equal_values_and_auto_are_welcome(tmp_path):
    config = {"gradient_clipping": 0.0, "train_batch_size": "auto", "fp16": {"enabled": False}}
    assert resolve_config(file(tmp_path, config), train(), 4)["train_batch_size"] == 64


def test_missing_config_names_the_shipped_ones():
    with pytest.raises(ValueError, match="no DeepSpeed config 'zero9': .*zero2"):
        resolve_config("zero9", train(), 4)


def test_library_configs():
    config = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}
    done = with_batch_arithmetic(config, 4)
    assert done["gradient_accumulation_steps"] == 4 and done["gradient_clipping"] == 1.0
    assert config == {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2}  # the caller's is untouched
    with pytest.raises(ValueError, match="gradient_accumulation_steps 8 contradicts .* which make 4"):
        with_batch_arithmetic({**config, "gradient_accumulation_steps": 8}, 4)
    with pytest.raises(ValueError, match="must state train_batch_size"):
        with_batch_arithmetic({"train_micro_batch_size_per_gpu": 2}, 4)
    with pytest.raises(ValueError, match="train_micro_batch_size_per_gpu given with packing"):
        with_batch_arithmetic(config, 4, packed=True)
    with pytest.raises(ValueError, match="managed_gradient_accumulation is false"):
        with_batch_arithmetic({**config, "managed_gradient_accumulation": False}, 4)


def test_what_shards_the_model_as_it_loads_takes_any_number_of_ranks_in_packing(monkeypatch):
    from deepspeed.runtime.config import DeepSpeedConfig

    config = resolve_config("zero3", train(packing=True, global_batch_size=8), 3)
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda *_: 3)
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)
    monkeypatch.setattr("deepspeed.comm.is_initialized", lambda *_: True)
    with pytest.raises(AssertionError, match="Check batch related parameters"):
        DeepSpeedConfig(config)
    assert DeepSpeedConfig(with_batch_arithmetic(config, 3, packed=True)).world_size == 3
