"""IFD, LESS and S2L on 20 samples, on one and two ranks, against slow, plain computations that share no code with them."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ..conftest import tiny_llama
from ..test_baselines import plain_signs
from .ranks import run_on_ranks

pytestmark = pytest.mark.distributed

RECIPE = """\
model: {{name_or_path: {model}}}
data: {{path: {folder}/rows.jsonl, template: alpaca, max_length: 400}}
selection: {{num_clusters: 2, min_fraction: 0.3, tokens_per_batch: 1024}}
train: {{epochs: 1, global_batch_size: 20, micro_batch_size: 5, lr: 1e-3, max_grad_norm: 0, precision: fp32, gradient_checkpointing: false}}
deepspeed: {{config: cpu}}
evaluate: {{held_out_sources: {{short: {{path: {folder}/short.jsonl}}, long: {{path: {folder}/long.jsonl}}}}}}
baselines:
  less:
    lora: {{rank: 2, alpha: 8, dropout: 0, target_modules: [q_proj, v_proj]}}
    warmup_fraction: 1.0
    warmup_epochs: 3
    lr: 1e-2
    projection_dim: 64
  s2l: {{model: {{name_or_path: {model}}}, epochs: 4, snapshots: 4, num_clusters: 3, lr: 1e-3}}
"""
PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:"
)
WORDS = "red orange yellow green blue indigo violet black white grey brown pink".split()


def rows_of(count, seed):
    rng = np.random.default_rng(seed)
    return [
        {"instruction": f"name {n} colours, number {seed}.{i}", "output": " ".join(rng.choice(WORDS, n))}
        for i, n in enumerate(rng.integers(1, 9, count))
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    from cluster_ds.embedded import byte_tokenizer

    folder = tmp_path_factory.mktemp("baselines")
    tiny_llama(vocab_size=259, max_position_embeddings=512).save_pretrained(folder / "model")
    byte_tokenizer().save_pretrained(folder / "model")
    for name, rows in (("rows", rows_of(20, 1)), ("short", rows_of(6, 2)), ("long", rows_of(6, 3))):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, model=folder / "model"))
    return folder


def scored(rank, world, folder, run):
    """All three baselines' scores and plans, as rank 0 makes them."""
    import torch.distributed as dist

    from cluster_ds.baselines import ifd, less, s2l
    from cluster_ds.baselines.setting import Budget, Setting
    from cluster_ds.comparison.running import is_test
    from cluster_ds.distributed import Ranks
    from cluster_ds.prepare import prepare_samples
    from cluster_ds.recipe_file import load_recipe
    from cluster_ds.runs import held_out_tokens

    from ..conftest import hand_plan

    torch.set_num_threads(1)
    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    recipe = load_recipe(str(folder / "recipe.yaml"), [f"data.cache_dir={folder / run / 'cache'}"])
    (folder / run).mkdir(exist_ok=True)
    samples = prepare_samples(recipe, folder / run, ranks)
    held_out = held_out_tokens(recipe, folder / run, ranks)
    tokens = samples.tokens
    base = hand_plan(
        np.arange(20) % 2, ids=tokens.ids, num_tokens=tokens.num_tokens, num_supervised=tokens.num_supervised
    )
    base.manifest.update(
        provenance=samples.provenance, sizes=[10, 10], cap=15, floor=3, num_moved=0, gap=0.0, inertia=0.0
    )
    setting = Setting(
        recipe, samples, base, folder / run / "scores", ranks, held_out, np.flatnonzero(~is_test(held_out.ids))
    )
    for module in (ifd, less, s2l):
        module.score(setting)
    ranks.gather(True)
    made = {path: path.stat().st_mtime_ns for path in (folder / run / "scores").rglob("*.safetensors")}
    ranks.gather(True)
    for module in (ifd, less, s2l):
        module.score(setting)
    ranks.gather(True)
    assert made and made == {path: path.stat().st_mtime_ns for path in made}  # nothing is made twice
    out = {"ids": tokens.ids, "held_out": held_out.ids, "validation": setting.validation_rows, "sources": held_out.sources}
    if rank == 0:
        out["ifd"] = ifd.losses(setting)
        out["less"] = less.scores(setting)
        out["warm_up"] = [str(less._snapshot(setting, epoch)) for epoch in range(3)]
        out["s2l"] = np.load(s2l._folder(setting) / "trajectories.npy")
        out["plans"] = {m.__name__: m.select(setting, Budget(8), 0) for m in (ifd, less, s2l)}
    return out


@pytest.fixture(scope="module", params=[pytest.param(1, marks=pytest.mark.slow), 2])
def found(folder, request):
    return run_on_ranks(scored, request.param, folder, f"w{request.param}")[0]


def texts(folder, name):
    """(prompt, answer) of every row of a file, by its number."""
    rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    return [(PROMPT.format(row["instruction"]), row["output"]) for row in rows]


def ids_of(text):
    """Byte tokens: 3 + the place of the byte in the tokenizer's alphabet, found by the tokenizer's own vocabulary."""
    from cluster_ds.embedded import byte_tokenizer

    return byte_tokenizer()(text, add_special_tokens=False)["input_ids"]


def answer_loss(model, before, answer):
    """Mean token loss of an answer and its end marker behind BOS and a text, from whole logits."""
    prompt, end = [1, *ids_of(before)], [*ids_of(answer), 2]
    ids = torch.tensor([*prompt, *end])
    logits = model(input_ids=ids[None]).logits[0, :-1]
    return F.cross_entropy(logits[len(prompt) - 1 :], ids[len(prompt) :])


def reference_model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)


def test_ifd_is_the_ratio_of_two_whole_forward_passes(folder, found):
    model = reference_model(folder)
    with torch.no_grad():
        pairs = [
            [float(answer_loss(model, prompt, answer)), float(answer_loss(model, "### Response:", answer))]
            for prompt, answer in texts(folder, "rows")
        ]
    expected = np.array(pairs)
    assert np.allclose(found["ifd"]["conditioned"], expected[:, 0], rtol=1e-5)
    assert np.allclose(found["ifd"]["direct"], expected[:, 1], rtol=1e-5)
    ifd = expected[:, 0] / expected[:, 1]
    order = sorted(range(20), key=lambda row: (ifd[row] > 1, -ifd[row] if ifd[row] <= 1 else ifd[row]))
    plan = found["plans"]["cluster_ds.baselines.ifd"]
    assert np.flatnonzero(plan.kept).tolist() == sorted(order[:8])
    assert plan.manifest["cost"]["forwards"] == 40 and plan.manifest["cost"]["backwards"] == 0
    assert plan.manifest["selection"]["below 1"] == int((ifd <= 1).sum())


def plain_less(folder, found):
    """Adapters trained by Adam written out, then LESS's scores with the matrix in memory, in float64 and without peft."""
    model, section = reference_model(folder), {"rank": 2, "scaling": 8 / 2}
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    from safetensors.torch import load_file

    snapshots = [load_file(path) for path in found["warm_up"]]
    names = [name.removeprefix("weight/") for name in snapshots[0] if name.startswith("weight/")]
    # The first step has learning rate 0, so the first snapshot holds what the adapters began with.
    weights = {name: snapshots[0][f"weight/{name}"].double().clone().requires_grad_() for name in names}
    layers = {name.rpartition(".lora_")[0] for name in names}

    def adapted(layer):
        linear = model.get_submodule(layer.removeprefix("base_model.model."))

        def hook(module, inputs, output):
            a, b = (weights[f"{layer}.lora_{part}.default.weight"] for part in "AB")
            return output + section["scaling"] * inputs[0] @ a.T @ b.T

        linear.register_forward_hook(hook)

    for layer in layers:
        adapted(layer)
    rows, held_out = texts(folder, "rows"), [*texts(folder, "short"), *texts(folder, "long")]

    def gradient(pair):
        return torch.autograd.grad(answer_loss(model, *pair), [weights[name] for name in names])

    m = {name: torch.zeros_like(weights[name]) for name in names}
    v = {name: torch.zeros_like(weights[name]) for name in names}
    subtasks = np.array(found["sources"])[found["validation"]]
    scores, parameters = np.zeros((20, 2)), sum(w.numel() for w in weights.values())
    matrix = None
    for step, (lr, snapshot) in enumerate(zip((0.0, 1e-2, 5e-3), snapshots, strict=True), 1):
        every = [gradient(pair) for pair in rows]
        for number, name in enumerate(names):
            g = sum(grads[number] for grads in every) / 20
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            change = (m[name] / (1 - 0.9**step)) / (torch.sqrt(v[name] / (1 - 0.999**step)) + 1e-8)
            weights[name] = (weights[name].detach() - lr * change).requires_grad_()
            for part, now in (("weight", weights), ("m", m), ("v", v)):
                scale = float(now[name].detach().abs().max()) + 1e-30
                assert float((snapshot[f"{part}/{name}"] - now[name]).abs().max()) / scale < 1e-4, (step, part, name)
        order = model_order(snapshot, names)
        flat = lambda parts, order=order: np.concatenate(  # noqa: E731
            [parts[names.index(name)].numpy().ravel() for name in order]
        )
        matrix = plain_signs(0, parameters, 64) if matrix is None else matrix
        moment, square = (flat([x[name] for name in names]) for x in (m, v))
        features = []
        for pair in rows:
            g = flat(gradient(pair))
            feature = (0.9 * moment + 0.1 * g) / np.sqrt(0.999 * square + 0.001 * g * g + 1e-8)
            features.append(feature @ matrix)
        wanted = [flat(gradient(held_out[row])) @ matrix for row in found["validation"]]
        unit = [np.stack([x / np.linalg.norm(x) for x in vectors]) for vectors in (features, wanted)]
        products = unit[0] @ unit[1].T
        for number, name in enumerate(("short", "long")):
            scores[:, number] += (lr / 1.5e-2) * products[:, subtasks == name].mean(axis=1)
    assert np.abs(scores[:, 0] - scores[:, 1]).min() > 0.01  # neither a sum nor a mean would pass for the maximum
    return scores.max(axis=1)


def model_order(snapshot, names):
    """Adapters in the order of the model's parameters: layer by layer, q before v, A before B."""
    return sorted(names, key=lambda name: (int(name.split(".layers.")[1].split(".")[0]), "v_proj" in name, "lora_B" in name))


def test_less_is_the_plain_computation(folder, found):
    expected = plain_less(folder, found)
    assert np.abs(found["less"] - expected).max() < 2e-3  # features are kept in half precision
    assert np.ptp(expected) > 0.02
    plan = found["plans"]["cluster_ds.baselines.less"]
    assert np.flatnonzero(plan.kept).tolist() == sorted(np.argsort(-found["less"], kind="stable")[:8].tolist())
    assert plan.manifest["cost"]["forwards"] == plan.manifest["cost"]["backwards"] == 3 * 20 + 3 * (20 + 6)


def test_s2l_notes_the_loss_of_every_sample_at_every_snapshot(folder, found):
    """Four epochs of one step, four snapshots; the model of the first has seen a step of learning rate 0."""
    model = reference_model(folder)
    with torch.no_grad():
        expected = np.array([float(answer_loss(model, *pair)) for pair in texts(folder, "rows")])
    assert found["s2l"].shape == (20, 4)
    assert np.allclose(found["s2l"][:, 0], expected, rtol=1e-5)
    assert (found["s2l"].mean(axis=0)[1:] < found["s2l"].mean(axis=0)[0]).all()
    plan = found["plans"]["cluster_ds.baselines.s2l"]
    assert plan.kept.sum() == 8 and plan.manifest["cost"]["forwards"] == 0
    assert plan.manifest["cost"]["small_forwards"] == 4 * 20 + 4 * 20 and plan.manifest["cost"]["small_backwards"] == 80
