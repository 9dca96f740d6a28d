"""What the engine refuses, what plain fine-tuning and the full data's token mean demand, and bf16 at stage 0."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cluster_ds.engine import StepRecord

from ..conftest import hand_plan, random_samples, tiny_llama
from .ranks import run_on_ranks

pytestmark = pytest.mark.distributed
CONFIG = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 0},
}


def plan_for(samples, clusters, **changes):
    return hand_plan(
        clusters, ids=[s["id"] for s in samples], num_tokens=[len(s["input_ids"]) for s in samples],
        num_supervised=[int((s["labels"][1:] != -100).sum()) for s in samples], **changes,
    )


def first_step(samples, plan, config=CONFIG, model=None, **settings):
    import cluster_ds

    model = model or tiny_llama()
    if "packing" in settings:
        config = {k: v for k, v in config.items() if "micro" not in k}
    engine, _, loader, _ = cluster_ds.initialize(
        model=model, config=config, dataset=samples, plan=plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        **settings,
    )
    for batch in loader:
        engine.backward(engine(batch))
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        if engine.step():
            return engine, gradients
    raise AssertionError("no step")


def padded(batch):
    from cluster_ds.tokens import pad_batch

    return {key: torch.from_numpy(value) for key, value in pad_batch(batch, 0).items()}


def mean_loss_of_each(outputs, batch):
    """As a user would write it."""
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return losses.sum(dim=1) / (labels != -100).sum(dim=1)


def scaled_llama():
    """As models do that scale their logits behind the head."""
    model = tiny_llama(initializer_range=0.5)
    model.register_forward_hook(lambda _, __, out: setattr(out, "logits", out.logits * 0.5) or out)
    return model


def leaking_llama():
    """As models do that have no notion of packs: every layer attends to all that stands before."""
    model = tiny_llama(attn_implementation="eager", initializer_range=0.5)
    for layer in model.model.layers:
        attention = layer.self_attn.forward

        def forward(*args, f=attention, attention_mask=None, **how):
            length = how["hidden_states"].shape[1]
            causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
            return f(*args, attention_mask=causal, **how)

        layer.self_attn.forward = forward
    return model


def one_spawn(rank, world):
    import cluster_ds

    out = {}
    # Eight copies of two samples: kept are two of each cluster, so the weighted token mean must be the full data's.
    short, long = random_samples(2, seed=4, longest=24)
    clusters = np.array([0] * 12 + [1] * 4)
    copies = [{**(short if c == 0 else long), "id": f"c{i:03d}"} for i, c in enumerate(clusters)]
    kept = np.isin(np.arange(16), [0, 1, 2, 3, 12, 13, 14, 15])
    engine, _ = first_step(copies, plan_for(copies, clusters, kept=kept), normalization="token_mean")
    out["token_mean"] = engine.last_loss

    samples = random_samples(8, seed=6)
    plan = plan_for(samples, [0, 0, 0, 0, 0, 1, 1, 1], weights=np.ones(8), strata=[0] * 8)
    engine, gradients = first_step(samples, plan)
    out["plain"] = (engine.last_loss, gradients)

    def message(work):
        try:
            work()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was refused"

    model = tiny_llama()
    engine, _, loader, _ = cluster_ds.initialize(
        model=model, config=CONFIG, dataset=samples, plan=plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    loss = engine(next(iter(loader)))
    out["foreign backward"] = message(lambda: (loss * 2).backward())
    out["gradient after refusal"] = all(p.grad is None for p in model.parameters())

    mine = plan if rank == 0 else plan_for(samples, [0, 0, 0, 0, 1, 1, 1, 1])
    other = {"model": tiny_llama(), "config": CONFIG, "dataset": samples}
    out["other plan"] = message(lambda: cluster_ds.initialize(plan=mine, **other))
    out["batch sizes"] = message(
        lambda: cluster_ds.initialize(plan=plan, **{**other, "config": {**CONFIG, "train_batch_size": 6}})
    )
    swapped = [samples[1], samples[0], *samples[2:]]
    out["other data"] = message(lambda: first_step(swapped, plan))

    weighted = plan_for(samples, [0, 0, 0, 0, 0, 1, 1, 1])
    own = {"loss_fn": mean_loss_of_each, "collate": padded}
    for name, normalization in (("sample", "sample_mean"), ("token", "token_mean")):
        builtin, expected = first_step(samples, weighted, normalization=normalization)
        engine, gradients = first_step(samples, weighted, normalization=normalization, **own)
        difference = max((gradients[n] - g).abs().max().item() for n, g in expected.items())
        out[f"loss_fn {name}"] = (engine.last_loss, builtin.last_loss, difference)
    out["loss_fn scalar"] = message(lambda: first_step(samples, weighted, **{**own, "loss_fn": lambda o, b: o.logits.mean()}))
    for name, model, how in (("scaled", scaled_llama(), {}), ("leaking", leaking_llama(), {"packing": cluster_ds.Packing(24, 24)})):
        config = {k: v for k, v in CONFIG.items() if not how or "micro" not in k}
        wrong, _, loader, _ = cluster_ds.initialize(
            model=model, config=config, dataset=samples, plan=plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **how
        )
        out[name] = message(lambda wrong=wrong, loader=loader: wrong(next(iter(loader))))
    pack = {"packing": cluster_ds.Packing(60, 60)}
    longest = int(plan.num_tokens.max())
    out["long"] = message(lambda: first_step(samples, weighted, packing=cluster_ds.Packing(longest - 1, longest - 1)))
    blind = tiny_llama()
    blind.forward = lambda input_ids, **_: None
    out["blind"] = message(lambda: first_step(samples, weighted, model=blind, **pack))
    miscounted = replace(weighted, num_tokens=weighted.num_tokens + 1)
    out["miscounted"] = message(lambda: first_step(samples, miscounted))
    out["packed loss_fn"] = message(lambda: first_step(samples, weighted, **{**own, "packing": cluster_ds.Packing(60, 60)}))
    out["step_vote"] = engine.last_record.num_stop_votes

    bf16 = {**CONFIG, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}}
    model = tiny_llama().bfloat16()
    before = {n: p.detach().float().clone() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    engine, _, loader, _ = cluster_ds.initialize(model=model, config=bf16, dataset=samples, plan=plan, optimizer=optimizer)
    masters = [p for group in engine.engine.basic_optimizer.param_groups for p in group["params"]]
    out["phantom"] = (
        [int(s.get("step", 0)) for s in engine.engine.basic_optimizer.state.values()],
        max((m.float() - b).abs().max().item() for m, b in zip(masters, before.values(), strict=True)),
    )
    return out


@pytest.fixture(scope="module")
def found():
    return run_on_ranks(one_spawn, 2)


def test_weighted_token_mean_is_the_full_datas_token_mean(found):
    model = tiny_llama()
    short, long = random_samples(2, seed=4, longest=24)
    sums, counts = [], []
    for sample, copies in ((short, 12), (long, 4)):
        ids, labels = torch.tensor(sample["input_ids"])[None], torch.tensor(sample["labels"])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        sums.append(copies * F.cross_entropy(logits, labels[1:], reduction="sum").item())
        counts.append(copies * int((labels[1:] != -100).sum()))
    assert counts[0] / 12 != counts[1] / 4  # unequal lengths, or sum T_i would do as well
    assert found[0]["token_mean"] == pytest.approx(sum(sums) / sum(counts), rel=1e-5)


def test_weights_of_one_are_plain_fine_tuning(found):
    """Hugging Face's own loss, one sample at a time, averaged."""
    model = tiny_llama()
    samples = random_samples(8, seed=6)
    losses = [
        model(input_ids=torch.tensor(s["input_ids"])[None], labels=torch.tensor(s["labels"])[None]).loss for s in samples
    ]
    loss = torch.stack(losses).mean()
    loss.backward()
    value, gradients = found[0]["plain"]
    assert value == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["sample", "token"])
def test_a_loss_of_ones_own_gives_the_same_gradient(found, name):
    mine, builtin, difference = found[0][f"loss_fn {name}"]
    assert mine == pytest.approx(builtin, rel=1e-6) and difference < 1e-6


def test_a_loss_fn_that_averages_over_samples_is_refused(found):
    assert "loss_fn gave a loss of shape [] for 2 samples: it must give one loss a sample" in found[0]["loss_fn scalar"]
    assert found[0]["step_vote"] == 0


def test_foreign_backward_is_refused_before_any_gradient(found):
    assert "RuntimeError: call engine.backward(loss), not loss.backward()" in found[0]["foreign backward"]
    assert found[0]["gradient after refusal"]


def test_ranks_with_different_plans_are_refused_on_both(found):
    assert all("ValueError: ranks disagree about plan" in result["other plan"] for result in found)


def test_batch_sizes_that_do_not_divide(found):
    assert "global_batch_size 6 is not a multiple of micro_batch_size 2 x 2 ranks = 4" in found[0]["batch sizes"]


def test_a_data_set_in_another_order_is_refused(found):
    assert any("but the plan has" in result["other data"] for result in found)


def test_bf16_at_stage_0_starts_from_the_weights_without_a_step(found):
    steps, drift = found[0]["phantom"]
    assert set(steps) <= {0} and drift == 0.0


def test_losses_that_would_be_wrong_are_refused_on_the_first_batch(found):
    for rank in found:
        assert "LlamaForCausalLM: its losses are not what its output embeddings make of its hidden states" in rank["scaled"]
        assert "a sample's losses change when others stand before it in its pack: set train.packing to false" in rank["leaking"]
        assert "packing needs a Hugging Face causal language model" in rank["packed loss_fn"]


def test_what_cannot_be_packed_is_refused_before_anything_is_built(found):
    for rank in found:
        assert "tokens, more than a pack of" in rank["long"] and "raise max_tokens" in rank["long"]
        assert "takes no position_ids, so it cannot tell the samples of a pack apart" in rank["blind"]
        assert "tokens, the plan says" in rank["miscounted"] and "with the lengths of these input_ids" in rank["miscounted"]


def test_skew_is_the_slowest_over_the_mean():
    sums = {f: 0 for f in StepRecord.__dataclass_fields__}
    assert StepRecord(**{**sums, "rank_seconds": [3.0, 1.0]}).skew == 1.5
    assert StepRecord(**{**sums, "rank_seconds": [2.0, 2.0, 2.0]}).skew == 1.0
