"""The baselines' pure parts against hand-worked cases and plain computations; whole ones in distributed/test_baselines.py."""

import copy

import numpy as np
import pytest
import torch
from scipy import stats

from cluster_ds.baselines.experience import varied_rows
from cluster_ds.baselines.ifd import AnswersAlone, ranked, ratios
from cluster_ds.baselines.less import adam_feature
from cluster_ds.baselines.projection import project, signs
from cluster_ds.baselines.s2l import ascending_quotas, balanced, trajectories
from cluster_ds.baselines.setting import Budget, nearest_in_tokens
from cluster_ds.comparison.intervals import paired_difference
from cluster_ds.comparison.running import is_test
from cluster_ds.recipe_file import load_recipe
from cluster_ds.templates import answer_opening

MASK = (1 << 64) - 1


def splitmix(x):
    """The generator's finalizer on Python's whole numbers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def plain_signs(seed, rows, dim):
    """The matrix of `projection`, entry by entry."""
    start = splitmix(((seed + 1) * 0x9E3779B97F4A7C15) & MASK)
    out = np.empty((rows, dim))
    for i in range(rows):
        for j in range(dim):
            word = splitmix(((i * (dim // 64) + j // 64) * 0x9E3779B97F4A7C15 + start) & MASK)
            out[i, j] = 1.0 if word >> (j % 64) & 1 else -1.0
    return out


def test_the_signs_are_those_of_the_hash_wherever_a_block_begins():
    expected = plain_signs(3, 11, 128)
    assert np.array_equal(signs(3, 0, 11, 128, torch.device("cpu")).numpy(), expected)
    assert np.array_equal(signs(3, 7, 11, 128, torch.device("cpu")).numpy(), expected[7:])
    assert not np.array_equal(plain_signs(4, 11, 128), expected)
    many = signs(0, 0, 4096, 256, torch.device("cpu")).float().numpy()
    assert abs(many.mean()) < 5 / np.sqrt(many.size)
    gram = many.T @ many / len(many) - np.eye(256)
    assert np.abs(gram).max() < 6 / np.sqrt(len(many))  # 32,640 pairs of columns


def test_projection_in_blocks_equals_the_whole_matrix(monkeypatch):
    monkeypatch.setattr("cluster_ds.baselines.projection._BLOCK", 64 * 10)
    gradients = np.random.default_rng(0).normal(size=(5, 37))
    gradients[3] = 0
    expected = gradients @ plain_signs(1, 37, 64)
    norms = np.linalg.norm(expected, axis=1, keepdims=True)
    expected = expected / np.where(norms > 0, norms, 1)
    assert np.allclose(project(torch.from_numpy(gradients).float(), 64, 1).numpy(), expected, atol=1e-6)


def test_adams_feature_by_hand():
    """g = 2, m = .5, v = .04: (.45 + .2) / sqrt(.03996 + .004 + 1e-8), eps under the root and no bias correction."""
    found = float(adam_feature(torch.tensor([2.0]), torch.tensor([0.5]), torch.tensor([0.04]))[0])
    assert found == pytest.approx(0.65 / np.sqrt(0.04396 + 1e-8), rel=1e-6)


def test_ifd_orders_and_fills_up():
    """Under 1 the hardest first; then over 1 the lowest first, then what was cut, then what has no loss."""
    scores = np.array([0.5, 0.9, 1.5, 1.2, 0.95, np.nan, 0.2])
    truncated = np.array([False, False, False, False, True, False, False])
    order, num_good = ranked(scores, truncated, np.arange(7))
    assert order.tolist() == [1, 0, 6, 3, 2, 4, 5] and num_good == 3
    assert ranked(scores, truncated, np.array([6, 4, 2]))[0].tolist() == [6, 2, 4]
    conditioned, direct = np.array([1.0, 2.0, 1.0]), np.array([2.0, 2.5, np.nan])
    assert np.allclose(ratios(conditioned, direct, "loss"), [0.5, 0.8, np.nan], equal_nan=True)
    assert np.allclose(ratios(conditioned, direct, "perplexity")[:2], np.exp([-1.0, -0.5]))


def test_what_stands_before_an_answer(byte_tokenizer, smollm2):
    text = {name: byte_tokenizer.decode(answer_opening(name, byte_tokenizer)) for name in ("alpaca", "magicoder", "chat")}
    assert text == {"alpaca": "### Response:", "magicoder": "@@ Response\n", "chat": "[assistant]\n"}
    assert answer_opening("plain", byte_tokenizer) == []
    assert smollm2.decode(answer_opening("chat", smollm2)) == "<|im_start|>assistant\n"
    ended = copy.deepcopy(byte_tokenizer)  # as Phi-3's: a chat without generation prompt ends with EOS
    ended.chat_template = (
        "{% for m in messages %}{{ m.content }}<pad>{% endfor %}"
        "{% if add_generation_prompt %}<bos>assistant{% else %}<eos>{% endif %}"
    )
    assert ended.decode(answer_opening("chat", ended)) == "<bos>assistant"


class Table:
    """What `AnswersAlone` asks of a token table, from lists of (ids, supervised)."""

    def __init__(self, rows):
        self.ids = [f"r{i}" for i in range(len(rows))]
        self.input_ids = np.concatenate([ids for ids, _ in rows])
        self.supervised = np.concatenate([mask for _, mask in rows]).astype(bool)
        self.offsets = np.cumsum([0, *(len(ids) for ids, _ in rows)])

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, row):
        span = slice(self.offsets[row], self.offsets[row + 1])
        labels = np.where(self.supervised[span], self.input_ids[span], -100)
        return {"id": self.ids[row], "input_ids": self.input_ids[span], "labels": labels}


def test_answers_alone_of_several_turns():
    """BOS 1 where the sample has one, the opening (7, 8) before each answer, prompts left out."""
    table = Table([([1, 4, 5, 20, 21, 6, 22], [0, 0, 0, 1, 1, 0, 1]), ([4, 30, 31], [0, 1, 1]), ([40, 41], [1, 1])])
    alone = AnswersAlone(table, [7, 8], 1)
    assert [alone[row]["input_ids"].tolist() for row in range(3)] == [[1, 7, 8, 20, 21, 7, 8, 22], [7, 8, 30, 31], [7, 8, 40, 41]]
    assert alone[0]["labels"].tolist() == [-100, -100, -100, 20, 21, -100, -100, 22]
    assert alone.num_tokens.tolist() == [8, 4, 4] and alone.num_predicted.tolist() == [3, 2, 2]
    bare = AnswersAlone(table, [], None)
    assert [bare[row]["input_ids"].tolist() for row in range(3)] == [[20, 21, 22], [30, 31], [40, 41]]
    assert bare.num_tokens.tolist() == [3, 2, 2] and bare.num_predicted.tolist() == [2, 1, 1]  # the first has no predecessor


def test_s2l_quotas_by_hand():
    """12 of sizes 5, 1, 10, 3: 12 // 4 = 3 > 1, then 11 // 3 = 3, then 8 // 2 = 4, then 4."""
    assert ascending_quotas(np.array([5, 1, 10, 3]), 12).tolist() == [4, 1, 4, 3]
    assert ascending_quotas(np.array([5, 1, 10, 3]), 19).tolist() == [5, 1, 10, 3]
    assert ascending_quotas(np.array([], dtype=int), 3).tolist() == []


def test_s2l_takes_small_clusters_whole_and_pairs_last():
    rows = np.arange(100, 120)
    labels = np.array([0] * 10 + [1] * 5 + [2] * 3 + [3] * 2)
    taken = balanced(rows, labels, 11, np.random.default_rng(0))  # 11 // 3 = 3 of 3, 8 // 2 = 4 of 5, 4 of 10
    counts = np.bincount(labels[taken - 100], minlength=4)
    assert counts.tolist() == [4, 4, 3, 0] and len(set(taken)) == 11
    taken = balanced(rows, labels, 19, np.random.default_rng(0))  # all of the large ones, one of the pair
    assert np.bincount(labels[taken - 100], minlength=4).tolist() == [10, 5, 3, 1]
    assert len(set(balanced(rows, labels, 20, np.random.default_rng(0)))) == 20


def test_trajectories_follow_the_ids_and_lack_nothing():
    losses = np.array([[1.0, 2.0, np.inf], [4.0, 5.0, 6.0]])  # two snapshots of three samples
    found = trajectories(losses, ["c", "a", "b"], ["a", "b", "x", "c"])
    assert found.tolist() == [[2, 5], [0, 6], [0, 0], [1, 4]]


def test_varied_rows_are_ten_of_the_middle_of_each_cluster():
    """100 well separated prompts of 20 rows each: of every one the ten between the quartiles of its losses, by hand 5 to 14."""
    hidden = np.repeat(np.random.default_rng(0).normal(size=(100, 8)) * 100, 20, axis=0)
    chosen = varied_rows(hidden, np.tile(np.arange(20.0), 100), np.arange(2000))
    assert np.bincount(chosen // 20, minlength=100).tolist() == [10] * 100 and set(chosen % 20) == set(range(5, 15))
    # One point: all rows are in one cluster; ten of the 60 middle ones of 120, evenly spaced.
    whole = varied_rows(np.zeros((120, 2)), np.arange(120.0), np.arange(120))
    assert whole.tolist() == (30 + np.linspace(0, 59, 10).astype(int)).tolist()


def test_a_budget_of_tokens_takes_what_comes_nearest():
    tokens = np.array([5, 1, 10, 3])
    order = np.array([2, 0, 3, 1])
    assert Budget(2).first_of(order, tokens).tolist() == [2, 0]
    assert Budget(2, 16).first_of(order, tokens).tolist() == [2, 0]  # 15, not 18
    assert Budget(2, 1).first_of(order, tokens).tolist() == [2]
    calls = []

    def make(number):
        calls.append(number)
        return None if number > 70 else number

    assert nearest_in_tokens(make, lambda number: 3 * number, 1, 100, 100) == 33
    assert len(calls) <= 8 and nearest_in_tokens(make, lambda number: 3 * number, 1, 100, 900) == 70


def test_one_seed_is_the_paired_t_test():
    rng = np.random.default_rng(1)
    arm, reference = rng.normal(1.0, 0.3, (1, 30)), rng.normal(0.9, 0.3, (1, 30))
    found = paired_difference(arm, reference)
    test = stats.ttest_rel(arm[0], reference[0])
    interval = test.confidence_interval(0.95)
    assert found.low == pytest.approx(interval.low) and found.high == pytest.approx(interval.high)
    assert found.detectable > (found.high - found.low) / 2


@pytest.mark.parametrize(("seed_std", "example_std", "rest_std"), [(0.02, 0.1, 0.1), (0.0, 0.1, 0.05), (0.1, 0.02, 0.02)])
def test_intervals_cover_the_truth_for_crossed_effects(seed_std, example_std, rest_std):
    rng = np.random.default_rng(5)
    covered, seen = 0, 0
    for _ in range(500):
        effect = rng.normal(0, seed_std, (3, 1)) + rng.normal(0, example_std, (1, 40)) + rng.normal(0, rest_std, (3, 40))
        found = paired_difference(1.0 + 0.05 + effect, np.ones((3, 40)))
        covered += found.low <= 0.05 <= found.high
        seen += paired_difference(1.0 + effect, np.ones((3, 40))).verdict != "no difference seen"
    assert covered >= 0.93 * 500  # 95 % less two standard errors
    assert seen <= 0.05 * 500  # where there is none, it is rarely seen


def test_a_difference_below_what_can_be_detected_is_not_claimed():
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.1, (1, 100))
    noise -= noise.mean()
    tiny, large = (paired_difference(1.0 + shift + noise, np.ones((1, 100))) for shift in (-0.022, -0.2))
    assert tiny.high < 0 and tiny.verdict == "no difference seen" and large.verdict == "lower"
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 4\)"):
        paired_difference(np.ones((2, 3)), np.ones((2, 4)))


def test_the_test_half_is_half_and_does_not_depend_on_the_order():
    ids = [f"row {i}" for i in range(101)]
    half = is_test(ids)
    assert half.sum() == 50
    back = is_test(ids[::-1])
    assert np.array_equal(back[::-1], half)


def test_test_splits_cannot_decide():
    with pytest.raises(ValueError, match=r"baselines.less.*validation.m reads split test: selecting by test rows"):
        load_recipe("tiny", ["baselines.less.validation={m: {path: a.jsonl, split: test}}"])
