"""Every step's gradient on real ranks against one process in float64 that knows nothing of our loss code."""

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from cluster_ds.lora import with_adapters
from cluster_ds.recipe import LoraSection
from cluster_ds.schedule import Schedule

from ..conftest import hand_plan, random_samples, tiny_llama
from .ranks import run_on_ranks

pytestmark = pytest.mark.distributed
MICRO, WORLD, STEPS, SCALING, LR = 2, 2, 3, 2.0, 1.2  # a large step: rounding of stored weights stays small beside the update


@dataclass(frozen=True)
class Case:
    stage: int
    accumulation: int
    num_clusters: int
    normalization: str
    allocation: str
    tail: str
    optimizer: str = "sgd"
    clipping: float = 0.0
    skewed: bool = False
    packed: bool = False
    lora: bool = False
    sabotage: str = ""

    @property
    def global_batch_size(self):
        return MICRO * WORLD * self.accumulation

    def data(self):
        """Samples, and a plan with unequal clusters of which equal parts are kept (unequal ones where `skewed`)."""
        size, k = self.global_batch_size, self.num_clusters
        num_kept = STEPS * size - (size // 2 + 1 if self.tail == "short" else 0)
        rng = np.random.default_rng(self.accumulation * 10 + k)
        clusters = np.sort(np.concatenate([np.arange(num_kept) % k, rng.integers(0, k, num_kept // 2), [0] * size]))
        kept = np.zeros(len(clusters), dtype=bool)
        for c in range(k):
            share = num_kept // k + (c < num_kept % k)
            kept[rng.permutation(np.flatnonzero(clusters == c))[:share]] = True
        samples = random_samples(len(clusters), seed=k)
        plan = hand_plan(
            clusters, kept=kept, ids=[s["id"] for s in samples], num_tokens=[len(s["input_ids"]) for s in samples],
            num_supervised=[int((s["labels"][1:] != -100).sum()) for s in samples],
            weights=np.exp(rng.normal(size=len(clusters))) if self.skewed else None,
        )
        assert kept.sum() == num_kept
        return samples, plan

    def config(self):
        return {
            "train_batch_size": self.global_batch_size,
            **({} if self.packed else {"train_micro_batch_size_per_gpu": MICRO}),
            "gradient_clipping": self.clipping, "zero_allow_untested_optimizer": True, "communication_data_type": "fp32",
            "zero_optimization": {"stage": self.stage, "overlap_comm": False},
        }


COVER = [  # pairwise cover of clusters x normalization x allocation x last batch
    (2, "sample_mean", "cluster", "full"),
    (2, "token_mean", "tokens", "short"),
    (4, "sample_mean", "tokens", "short"),
    (4, "token_mean", "cluster", "full"),
    (3, "sample_mean", "cluster", "short"),
    (3, "token_mean", "tokens", "full"),
]
CASES = [Case(s, a, *rest) for s, a, rest in itertools.product((0, 1, 2, 3), (1, 4), COVER)]
CLIPPED = [Case(s, 4, 4, "sample_mean", "cluster", "short", clipping=0.5, skewed=True) for s in (0, 1, 2, 3)]
PACKED = [Case(s, a, *rest, packed=True) for s, a, rest in itertools.product((0, 1, 2, 3), (1, 4), COVER)]
LORA = [Case(s, 4, *rest, packed=s % 2 == 0, lora=True) for s, rest in itertools.product((0, 1, 2, 3), COVER)]
ADAMW = [Case(s, 4, 3, "token_mean", "tokens", "short", optimizer="adamw", skewed=True) for s in (0, 1, 2, 3)]
ADAFACTOR = [Case(0, a, 4, "sample_mean", "cluster", "short", optimizer="adafactor", skewed=True) for a in (1, 4)]
SABOTAGED = [
    replace(Case(2, 4, 3, normalization, allocation, "short", skewed=True), sabotage=kind)
    for kind in ("weight", "denominator", "slice")
    for normalization, allocation in (("sample_mean", "cluster"), ("token_mean", "tokens"))
]


def make_model(case):
    """Adapters whose update is not zero, so that both of their matrices have gradients."""
    model = tiny_llama()
    if not case.lora:
        return model
    model = with_adapters(model, LoraSection(rank=4, alpha=SCALING * 4), seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def trained_parameters(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class PlainModel:
    """What `make_model` is, in float64: adapters are added to the weights before they are used, without peft."""

    def __init__(self, case):
        self.model = tiny_llama().double()
        ours = trained_parameters(make_model(case) if case.lora else self.model)
        self.parameters = {name: p.detach().double().requires_grad_() for name, p in ours.items()} if case.lora else ours
        self.lora = case.lora

    def load(self, weights):
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(weights[name])

    def logits(self, ids):
        if not self.lora:
            return self.model(input_ids=ids).logits
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        for name, b in self.parameters.items():
            if "lora_B" in name:
                a = self.parameters[name.replace("lora_B", "lora_A")]
                inner = name.removeprefix("base_model.model.").replace(".lora_B.default", "")
                weights[inner] = weights[inner] + SCALING * b @ a
        return torch.func.functional_call(self.model, weights, (), {"input_ids": ids}).logits


def make_optimizer(case, parameters):
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=LR)
    if case.optimizer == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(parameters, lr=1e-2, scale_parameter=False, relative_step=False)
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3, weight_decay=0.1)


def sabotage(kind, loader):
    """Change one thing on purpose; the comparison must notice."""
    batches = loader.batches
    if kind == "slice" and batches.dp_rank == 1:
        batches.dp_rank = 0
    elif kind:
        original = type(batches).__getitem__

        class Sabotaged(type(batches)):
            def __getitem__(self, step):
                batches = original(self, step)
                for batch in batches:
                    if kind == "weight":
                        batch["sample_weight"] = (batch["sample_weight"] > 0).double()
                    elif kind == "denominator":
                        batch["denominator"] *= 1.01
                return batches

        batches.__class__ = Sabotaged


def whole_weights(named, stage):
    import deepspeed

    with deepspeed.zero.GatheredParameters([p for _, p in named], enabled=stage == 3):  # collective
        return {name: p.detach().clone() for name, p in named}


def train_cases(rank, world, cases):
    from deepspeed.utils import safe_get_full_grad

    import cluster_ds

    results = []
    for case in cases:
        samples, plan = case.data()
        model = make_model(case)
        engine, _, loader, _ = cluster_ds.initialize(
            model=model, config=case.config(), dataset=samples, plan=plan, normalization=case.normalization,
            allocation=case.allocation, optimizer=make_optimizer(case, trained_parameters(model).values()), epochs=1, seed=1,
            packing=cluster_ds.Packing(40, 80) if case.packed else None, quadratic_cost=0.01,
        )
        sabotage(case.sabotage, loader)
        named = list(trained_parameters(engine.engine.module).items())
        steps, locals_ = [], []
        for batch in loader:
            locals_.append((batch["row"][~batch["is_filler"]].tolist(), batch["step"]))
            engine.backward(engine(batch))
            gradients = before = None
            if engine.engine.is_gradient_accumulation_boundary():
                get = safe_get_full_grad if case.stage else lambda p: p.grad
                gradients = {name: get(p).detach().float().clone() for name, p in named}  # collective at stage 3
                before = whole_weights(named, case.stage)
            if engine.step():
                steps.append((gradients if rank == 0 else None, engine.last_record, before))
        weights = whole_weights(named, case.stage)
        results.append({"steps": steps, "weights": weights, "rows": locals_})
        engine.engine.destroy()
    return results


def reference(case, weights_at=None):
    """One process, one sample at a time, float64, written from the formulas.

    With `weights_at` (one state a step) each step's gradient is taken there; otherwise the optimizer moves on.
    """
    samples, plan = case.data()
    model = PlainModel(case)
    parameters = model.parameters
    optimizer = make_optimizer(case, list(parameters.values()))
    schedule = Schedule(plan, global_batch_size=case.global_batch_size, seed=1)
    kept_per_cluster = np.bincount(plan.cluster[plan.kept])
    batches = [schedule.batch(step).rows for step in range(schedule.num_steps)]
    everywhere = set.intersection(*(set(plan.cluster[rows]) for rows in batches))
    steps = []
    for step in range(schedule.num_steps):
        if weights_at is not None:
            model.load(weights_at[step])
        rows = batches[step]
        in_batch = np.bincount(plan.cluster[rows], minlength=case.num_clusters)
        losses, weights, counts = [], [], []
        for row in rows:
            ids, labels = (torch.tensor(samples[row][k])[None] for k in ("input_ids", "labels"))
            ce = F.cross_entropy(model.logits(ids)[0, :-1], labels[0, 1:], ignore_index=-100, reduction="sum")
            c = plan.cluster[row]
            correction = len(rows) * kept_per_cluster[c] / (plan.kept.sum() * in_batch[c]) if c in everywhere else 1.0
            count = int((labels[0, 1:] != -100).sum())
            losses.append(ce / count if case.normalization == "sample_mean" else ce)
            weights.append(plan.weight[row] * correction)
            counts.append(count)
        weights, counts = np.array(weights), np.array(counts)
        total = len(rows) if case.normalization == "sample_mean" else float((weights * counts).sum())
        loss = sum(w * value for w, value in zip(weights, losses, strict=True)) / total
        optimizer.zero_grad()
        loss.backward()
        steps.append(({n: p.grad.clone() for n, p in parameters.items()}, loss.item(), weights.sum(), len(rows)))
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), case.clipping)
        optimizer.step()
    return steps, parameters


def norm(tensors):
    return torch.cat([t.double().flatten() for t in tensors]).norm().item()


def gradient_error(found, expected):
    whole = norm(found[n].double() - expected[n] for n in expected) / norm(expected.values())
    worst = max(norm([found[n].double() - expected[n]]) / norm([expected[n]]) for n in expected if norm([expected[n]]) > 0)
    return whole, worst


def update_error(found, expected, case):
    start = trained_parameters(make_model(case))
    return norm(found[n].double() - expected[n] for n in expected) / norm(expected[n] - start[n] for n in expected)


@pytest.fixture(scope="module")
def trained():
    cases = CASES + PACKED + LORA + CLIPPED + ADAMW + ADAFACTOR + SABOTAGED
    rank0, rank1 = run_on_ranks(train_cases, WORLD, cases)
    return {case: (a, b) for case, a, b in zip(cases, rank0, rank1, strict=True)}


@pytest.mark.parametrize("case", CASES + PACKED + LORA, ids=str)
def test_every_gradient_and_the_update(trained, case):
    """Packed samples stand end to end, and adapters' outputs are added to their layer's: the sums have another order."""
    bar = 1e-5 if case.packed or case.lora else 1e-6
    found, other = trained[case]
    _, weights = reference(case)
    expected, _ = reference(case, [before for _, _, before in found["steps"]])
    assert len(found["steps"]) == STEPS
    for (gradients, record, _), (reference_gradients, loss, weight_sum, num_samples) in zip(
        found["steps"], expected, strict=True
    ):
        whole, worst = gradient_error(gradients, reference_gradients)
        assert whole <= bar and worst <= 10 * bar, (whole, worst)
        assert record.loss == pytest.approx(loss, rel=1e-6)
        assert record.weight_sum == pytest.approx(weight_sum, rel=1e-12)
        assert record.num_samples == num_samples == sum(record.cluster_samples)
    assert update_error(found["weights"], weights, case) <= bar
    assert all(torch.equal(found["weights"][n], other["weights"][n]) for n in weights)  # ranks end alike


@pytest.mark.parametrize("case", CASES + PACKED + LORA, ids=str)
def test_census(trained, case):
    _, plan = case.data()
    found, other = trained[case]
    rows = [row for result in (found, other) for part, _ in result["rows"] for row in part]
    assert sorted(rows) == np.flatnonzero(plan.kept).tolist()
    recorded = [row for _, record, _ in found["steps"] for row in record.rows]
    assert sorted(recorded) == sorted(rows)


@pytest.mark.parametrize("case", CLIPPED, ids=str)
def test_clipping_with_skewed_weights(trained, case):
    expected, weights = reference(case)
    assert norm(expected[-1][0].values()) > 1.5 * case.clipping  # it does clip
    assert update_error(trained[case][0]["weights"], weights, case) <= 1e-5


@pytest.mark.parametrize("case", ADAMW, ids=str)
def test_adamw(trained, case):
    """eps 1e-3 keeps Adam's division from magnifying the rounding of gradients that are nearly zero."""
    assert update_error(trained[case][0]["weights"], reference(case)[1], case) <= 1e-5


@pytest.mark.parametrize("case", ADAFACTOR, ids=str)
def test_adafactor_at_stage_0_is_adafactor(trained, case):
    """The bar is looser than AdamW's: its eps of 1e-30 divides nearly zero gradients by nearly zero statistics."""
    assert update_error(trained[case][0]["weights"], reference(case)[1], case) <= 1e-4


@pytest.mark.parametrize("case", SABOTAGED, ids=str)
def test_a_wrong_weight_denominator_or_slice_is_noticed(trained, case):
    gradients = trained[case][0]["steps"][0][0]
    whole, _ = gradient_error(gradients, reference(replace(case, sabotage=""))[0][0][0])
    assert whole > 1e-3


def tail_on(rank, world, stage):
    case = Case(stage, 1, 1, "sample_mean", "tokens", "full")
    samples = random_samples(21, seed=9)
    plan = hand_plan(
        [0] * 21, num_tokens=[len(s["input_ids"]) for s in samples], ids=[s["id"] for s in samples],
        num_supervised=[int((s["labels"][1:] != -100).sum()) for s in samples],
    )
    import cluster_ds

    model = tiny_llama()
    engine, _, loader, _ = cluster_ds.initialize(
        model=model, config={**case.config(), "train_batch_size": 8}, dataset=samples, plan=plan, allocation="tokens",
        optimizer=make_optimizer(case, model.parameters()),
    )
    records, gradients = [], None
    for batch in loader:
        engine.backward(engine(batch))
        gradients = {n: p.grad.clone() for n, p in engine.engine.module.named_parameters() if p.grad is not None}
        if engine.step():
            records.append(engine.last_record)
    return records, gradients


def test_the_short_last_batch_is_the_same_on_1_2_and_4_ranks():
    found = {world: run_on_ranks(tail_on, world, 0)[0] for world in (1, 2, 4)}
    for records, _ in found.values():
        assert [r.num_samples for r in records] == [8, 8, 5]
        assert sorted(row for r in records for row in r.rows) == list(range(21))
    for world in (2, 4):
        assert found[world][0][2].loss == pytest.approx(found[1][0][2].loss, rel=1e-6)
        assert gradient_error(found[world][1], {n: g.double() for n, g in found[1][1].items()})[0] <= 1e-6
