"""Gradient proxies against a float64 reference that materialises the logits."""

import os

import numpy as np
import pytest
import torch

from cluster_ds.distributed import Ranks
from cluster_ds.features import projection_matrix
from cluster_ds.files import hash_files
from cluster_ds.proxy import Room, extract, gradient_proxies, run_batches
from cluster_ds.shards import length_batches, padding_share, read_proxies, shard_batches

from .conftest import in_order, random_samples, tiny_llama


class Table(list):
    """A token table in memory."""

    @property
    def ids(self):
        return [s["id"] for s in self]

    @property
    def num_tokens(self):
        return np.array([len(s["input_ids"]) for s in self])

    @property
    def num_supervised(self):
        return np.array([(s["labels"][1:] != -100).sum() for s in self])


def reference(model, sample):
    """(1/T) sum (p_t - 1) h_t from full logits, one sample, float64."""
    model = model.double()
    ids, labels = torch.tensor(sample["input_ids"]), torch.tensor(sample["labels"])
    hidden = []
    handle = model.lm_head.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][0]))
    with torch.no_grad():
        logits = model(input_ids=ids[None]).logits[0]
    handle.remove()
    probabilities = logits.softmax(dim=-1)
    total, losses = torch.zeros(hidden[0].shape[1], dtype=torch.float64), []
    for t in range(1, len(ids)):
        if labels[t] != -100:
            p = probabilities[t - 1, ids[t]]
            total += (p - 1) * hidden[0][t - 1]
            losses.append(-p.log().item())
    mean = total / len(losses)
    return mean / mean.norm(), mean.norm().item(), np.mean(losses)


@pytest.mark.parametrize("tied", [False, True])
def test_equal_to_the_reference(tied):
    samples = random_samples(30, seed=1)
    model = tiny_llama(tie_word_embeddings=tied).eval()
    batches = length_batches(np.array([len(s["input_ids"]) for s in samples]), 60)
    found = {}
    for rows, made in run_batches(model, Table(samples), batches, 0, torch.device("cpu"), Room(), gradient_proxies):
        for row, *values in zip(rows, *made, strict=True):
            found[int(row)] = values
    for row, sample in enumerate(samples):
        proxy, norm, loss = reference(model, sample)
        assert (found[row][0].double() - proxy).norm() < 2e-6
        assert found[row][1].item() == pytest.approx(norm, rel=2e-6)
        assert found[row][2].item() == pytest.approx(loss, rel=2e-6)
        model.float()


def test_confident_tokens_keep_their_digits():
    """p - 1 of a token with loss 1e-9 is -1e-9, not 0."""
    unit, norms, losses = gradient_proxies(torch.tensor([0]), torch.ones(1, 4), torch.tensor([1e-9]), 1)
    assert norms[0].item() == pytest.approx(2e-9, rel=1e-5) and unit[0].tolist() == pytest.approx([-0.5] * 4)


def test_a_zero_proxy_stays_zero():
    unit, norms, _ = gradient_proxies(torch.tensor([0]), torch.ones(1, 4), torch.tensor([0.0]), 1)
    assert unit.tolist() == [[0.0] * 4] and norms.tolist() == [0.0]


def test_batches_and_shards_hold_every_row_once():
    lengths = np.random.default_rng(0).integers(3, 500, 700)
    lengths[5] = 9000  # longer than the budget: alone
    batches = length_batches(lengths, 2048)
    assert sorted(np.concatenate(batches)) == list(range(700))
    assert all(len(b) * lengths[b].max() <= 2048 or len(b) == 1 for b in batches)
    padded = sum(len(b) * lengths[b].max() for b in batches)
    assert lengths.sum() / padded > 0.97
    shards = shard_batches(batches)
    assert sorted(np.concatenate([r for s in shards for r in s])) == list(range(700))
    work = [sum(len(b) * lengths[b].max() for b in s) for s in shards if 5 not in np.concatenate(s)]
    assert max(work) <= min(work) + 2 * 2048  # a batch more, and fuller ones


SETTINGS = {"key": "k", "pad_id": 0, "tokens_per_batch": 60, "cpu_threads": 1, "hidden_size": 32}


def test_finished_shards_are_kept_and_damage_is_named(tmp_path):
    samples = Table(random_samples(80, seed=2))
    ranks = Ranks(0, 1, 0)
    assert extract(samples, tmp_path / "a", tiny_llama, ranks, **SETTINGS) == 0
    whole = read_proxies(tmp_path / "a", samples, 60, "k")
    features = in_order(whole.features)
    norms = np.linalg.norm(features.astype(float), axis=1)
    assert features.dtype == np.float16 and np.abs(norms - 1).max() < 1e-3

    shard = tmp_path / "a" / "shard-00003.safetensors"
    sidecar = shard.with_suffix(".json")
    good = shard.read_bytes()
    shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(ValueError, match="shard-00003.safetensors is damaged, .*: `rm -f .*shard-00003.safetensors .*shard-00003.json` and the same"):
        read_proxies(tmp_path / "a", samples, 60, "k")
    sidecar.unlink()
    with pytest.raises(ValueError, match="shard-00003.safetensors is missing"):
        read_proxies(tmp_path / "a", samples, 60, "k")
    stamps = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()}
    done = extract(samples, tmp_path / "a", tiny_llama, ranks, **SETTINGS)
    assert done == len(list((tmp_path / "a").glob("*.safetensors"))) - 1
    again = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").iterdir()}
    assert {n for n in again if again[n] != stamps.get(n)} == {shard.name, sidecar.name}
    assert shard.read_bytes() == good
    np.testing.assert_array_equal(in_order(read_proxies(tmp_path / "a", samples, 60, "k").features), features)


def test_nan_names_the_samples(tmp_path):
    def broken():
        model = tiny_llama()
        model.model.embed_tokens.weight.data[7] = float("nan")
        return model

    samples = Table(random_samples(40, seed=3))
    with_seven = [s["id"] for s in samples if 7 in s["input_ids"]]
    with pytest.raises(ValueError, match="NaN or infinity on samples") as error:
        extract(samples, tmp_path, broken, Ranks(0, 1, 0), **SETTINGS)
    assert any(name in str(error.value) for name in with_seven)


def test_scaled_logits_are_refused_by_name(tmp_path):
    def scaled():
        model = tiny_llama(initializer_range=0.5)
        model.lm_head.register_forward_hook(lambda _, __, out: out * 3)
        return model

    with pytest.raises(ValueError, match="LlamaForCausalLM: its logits differ by up to .* it scales or caps them"):
        extract(Table(random_samples(20)), tmp_path, scaled, Ranks(0, 1, 0), **SETTINGS)


def test_out_of_memory_halves_the_budget_and_changes_nothing(tmp_path, capsys, monkeypatch):
    samples = Table(random_samples(40))
    extract(samples, tmp_path / "a", tiny_llama, Ranks(0, 1, 0), **SETTINGS)
    limit = 30
    sizes = []

    class Small(torch.nn.Module):
        """Room for `limit` tokens."""

        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, input_ids, **how):
            if input_ids.numel() > limit:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
            sizes.append(input_ids.numel())
            return self.inner(input_ids=input_ids, **how)

    def load():
        model = tiny_llama()
        model.model = Small(model.model)
        model.get_output_embeddings = lambda: model.lm_head
        return model

    monkeypatch.setattr("cluster_ds.proxy._check_model", lambda *_: None)  # it has its own tests
    extract(samples, tmp_path / "b", load, Ranks(0, 1, 0), **SETTINGS)
    assert max(sizes) <= limit and capsys.readouterr().out.count("going on with at most") == 1
    whole, halved = (read_proxies(tmp_path / name, samples, 60, "k") for name in ("a", "b"))
    assert np.allclose(in_order(whole.features), in_order(halved.features), atol=2e-3) and np.allclose(whole.losses, halved.losses, atol=1e-5)
    limit = 3
    with pytest.raises(ValueError, match=r"out of memory on sample s\d+ alone \(24 tokens\): lower data.max_length"):
        extract(samples, tmp_path / "c", load, Ranks(0, 1, 0), **SETTINGS)


def test_no_space_is_said_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ValueError, match=r"extraction needs about [\d.]+ GB in .*are free there: free space"):
        extract(Table(random_samples(20)), tmp_path, None, Ranks(0, 1, 0), **{**SETTINGS, "hidden_size": 10**12})


def test_shards_are_refused_by_name_with_the_command_that_mends_them(tmp_path):
    import json
    import shutil
    import subprocess

    samples = Table(random_samples(80, seed=2))
    folder = tmp_path / "my runs"

    def extracted():
        return extract(samples, folder, tiny_llama, Ranks(0, 1, 0), **SETTINGS)

    extracted()
    good = in_order(read_proxies(folder, samples, 60, "k").features)
    shard, other = folder / "shard-00002.safetensors", folder / "shard-00003.safetensors"
    sidecar = shard.with_suffix(".json")
    whole = {path: path.read_bytes() for path in (shard, sidecar)}
    facts = json.loads(sidecar.read_text())

    def flip(at):
        data = bytearray(whole[shard])
        data[at] ^= 4
        shard.write_bytes(data)

    damages = {
        "is damaged, it does not have the checksum of shard-00002.json": [
            lambda: flip(len(whole[shard]) // 2), lambda: flip(3), lambda: shard.write_bytes(b""), lambda: sidecar.write_text("{"),
            lambda: sidecar.write_text("{}"), lambda: sidecar.write_text("[]"), lambda: shutil.copy(other, shard),
        ],
        "is missing": [shard.unlink, sidecar.unlink],
        r"is of another model, other data or settings \(its key is zz, this run's k\)": [
            lambda: sidecar.write_text(json.dumps({**facts, "key": "zz"})),
        ],
        "holds other samples than this run's shard 2": [
            lambda: (shutil.copy(other, shard), sidecar.write_text(json.dumps({**facts, "hash": hash_files([shard])}))),
        ],
    }
    for message, ways in damages.items():
        for damage in ways:
            damage()
            with pytest.raises(ValueError, match=f"shard-00002.safetensors {message}") as error:
                read_proxies(folder, samples, 60, "k")
            command = str(error.value).split("`")[1]
            assert command == f"rm -f '{shard}' '{sidecar}'"
            subprocess.run(command, shell=True, check=True)
            assert extracted() == len(list(folder.glob("*.json"))) - 1  # that one alone is made anew
            np.testing.assert_array_equal(in_order(read_proxies(folder, samples, 60, "k").features), good)


def test_the_projection_is_written_in_the_same_pass(tmp_path):
    samples = Table(random_samples(30))
    wide = {"hidden_size": 320, "num_attention_heads": 4}
    extract(samples, tmp_path, lambda: tiny_llama(**wide), Ranks(0, 1, 0), **{**SETTINGS, "hidden_size": 320})
    features = read_proxies(tmp_path, samples, 60, "k").features
    assert len(features.projection) == len(features.parts) and features.projection[0].shape[1] == 256
    assert all(part.dtype == np.float16 for part in (*features.parts, *features.projection))
    expected = np.concatenate(features.parts).astype(np.float32) @ projection_matrix(320)
    np.testing.assert_allclose(np.concatenate(features.projection), expected, atol=2e-3)


def test_the_padding_is_told(tmp_path, capsys):
    samples = Table(random_samples(80, seed=2))
    extract(samples, tmp_path, tiny_llama, Ranks(0, 1, 0), **SETTINGS)
    lengths = samples.num_tokens
    batches = length_batches(lengths, 60)
    padded = sum(len(b) * lengths[b].max() for b in batches)
    share = f"{1 - lengths.sum() / padded:.1%} padding"
    assert share in capsys.readouterr().out and padding_share(lengths, batches) == pytest.approx(1 - lengths.sum() / padded)


def test_memory_that_runs_out_behind_the_forward_pass_halves_the_batch_too(tmp_path, monkeypatch):
    import cluster_ds.proxy as module

    samples = Table(random_samples(40))
    extract(samples, tmp_path / "a", tiny_llama, Ranks(0, 1, 0), **SETTINGS)
    whole, sizes = module.gradient_proxies, []

    def small(index, hidden, losses, num_samples):
        if len(hidden) > 24:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        sizes.append(len(hidden))
        return whole(index, hidden, losses, num_samples)

    monkeypatch.setattr(module, "gradient_proxies", small)
    extract(samples, tmp_path / "b", tiny_llama, Ranks(0, 1, 0), **SETTINGS)
    a, b = (in_order(read_proxies(tmp_path / name, samples, 60, "k").features) for name in ("a", "b"))
    assert max(sizes) <= 24 and np.allclose(a, b, atol=2e-3)


def test_a_model_that_looks_ahead_is_refused(tmp_path):
    def bidirectional():
        model = tiny_llama(attn_implementation="eager", initializer_range=0.5)
        for layer in model.model.layers:
            attention = layer.self_attn.forward
            layer.self_attn.forward = lambda *args, f=attention, attention_mask=None, **how: f(*args, attention_mask=None, **how)
        return model

    with pytest.raises(ValueError, match="LlamaForCausalLM: padding behind a sample changes its hidden states by up to"):
        extract(Table(random_samples(20)), tmp_path, bidirectional, Ranks(0, 1, 0), **SETTINGS)
    alike = Table(s for s in random_samples(800) if len(s["input_ids"]) == 9)  # nothing is padded, and it is noticed all the same
    assert len(alike) > 20
    with pytest.raises(ValueError, match="padding behind a sample changes its hidden states by up to"):
        extract(alike, tmp_path, bidirectional, Ranks(0, 1, 0), **SETTINGS)


def test_any_number_of_shards_may_be_open(tmp_path):
    import resource

    samples = Table(random_samples(400, longest=12))
    tiny = {**SETTINGS, "tokens_per_batch": 12}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        extract(samples, tmp_path, tiny_llama, Ranks(0, 1, 0), **tiny)
        proxies = read_proxies(tmp_path, samples, 12, "k")
        assert len(proxies.features.parts) > 40
        opened = len(os.listdir("/proc/self/fd"))
        again = read_proxies(tmp_path, samples, 12, "k")
        assert len(os.listdir("/proc/self/fd")) == opened and len(again.features.parts) > 40
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
