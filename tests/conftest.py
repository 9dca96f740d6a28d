import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"
sys.path.insert(0, str(ROOT))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests talk to nobody


@pytest.fixture(scope="session")
def shared() -> Path:
    """Small real data that lies beside the checkout on the developers' machines."""
    if not SHARED.is_dir():
        pytest.skip("the folder of small real data is not beside this checkout")
    return SHARED


@pytest.fixture(scope="session")
def byte_tokenizer():
    from cluster_ds.embedded import byte_tokenizer

    return byte_tokenizer()


@pytest.fixture(scope="session")
def smollm2():
    """SmolLM2-135M-Instruct's tokenizer."""
    from cluster_ds.embedded import resolve_model
    from cluster_ds.models import load_tokenizer

    return load_tokenizer(Path(resolve_model("embedded:smollm2-135m-instruct")))


@pytest.fixture(scope="session")
def sentencepiece_tokenizer(tmp_path_factory):
    """A real Llama-family tokenizer: 32,000 pieces, byte fallback, dummy prefix."""
    mistral_common = pytest.importorskip("mistral_common", reason="brings the sentencepiece model")
    from cluster_ds.models import load_tokenizer

    folder = tmp_path_factory.mktemp("sentencepiece")
    model = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
    (folder / "tokenizer.model").write_bytes(model.read_bytes())
    config = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return load_tokenizer(folder)


def tiny_llama(vocab_size: int = 64, seed: int = 0, **changes):
    """A Llama small enough for gradients in every test; float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = {
        "vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.06,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes}))
    for name, parameter in model.named_parameters():
        if "norm" in name:  # weights of 1 would store small updates with the coarsest rounding of all
            torch.nn.init.constant_(parameter, 0.5)
    return model


def random_samples(num: int, seed: int = 0, vocab_size: int = 64, longest: int = 24) -> list[dict]:
    """Samples of unequal lengths with a prompt that is not supervised."""
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(num):
        length = int(rng.integers(4, longest + 1))
        input_ids = rng.integers(3, vocab_size, length)
        labels = np.where(np.arange(length) < rng.integers(1, length - 1), -100, input_ids)
        samples.append({"id": f"s{i:04d}", "input_ids": input_ids, "labels": labels})
    return samples


def hand_plan(clusters, *, kept=None, weights=None, num_tokens=None, num_supervised=None, ids=None, strata=None):
    """A plan written down by hand, without clustering anything."""
    from cluster_ds.plan import Plan
    from cluster_ds.selection import cluster_weights

    clusters = np.asarray(clusters, dtype=np.int32)
    n = len(clusters)
    tokens = np.full(n, 8) if num_tokens is None else np.asarray(num_tokens)
    return Plan(
        ids=[f"s{i:04d}" for i in range(n)] if ids is None else ids,
        cluster=clusters,
        stratum=clusters.copy() if strata is None else np.asarray(strata, dtype=np.int32),
        distance=np.zeros(n),
        weight=cluster_weights(np.bincount(clusters))[clusters] if weights is None else np.asarray(weights, dtype=float),
        kept=np.ones(n, dtype=bool) if kept is None else np.asarray(kept, dtype=bool),
        num_tokens=tokens.astype(np.int64),
        num_supervised_tokens=(tokens - 1 if num_supervised is None else np.asarray(num_supervised)).astype(np.int64),
        loss=np.zeros(n, dtype=np.float32),
    )


def in_order(features) -> np.ndarray:
    """All vectors of `Features` in memory, in the order of their samples."""
    return np.concatenate(features.parts)[np.argsort(features.rows)]
