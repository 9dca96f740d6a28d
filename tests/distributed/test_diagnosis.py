"""What ranks see of each other's gradients before they are averaged, at every ZeRO stage, against one process's autograd."""

import pytest
import torch
import torch.nn.functional as F

from ..conftest import random_samples, tiny_llama
from .ranks import run_on_ranks
from .test_engine import plan_for

pytestmark = pytest.mark.distributed


def watched(rank, world):
    import cluster_ds
    from cluster_ds.diagnosis import GradientWatch

    samples = random_samples(16, seed=5)
    plan = plan_for(samples, [0] * 10 + [1] * 6)
    out = {}
    for stage in (0, 1, 2, 3):
        model = tiny_llama()
        config = {
            "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True, "communication_data_type": "fp32",
            "zero_optimization": {"stage": stage, "overlap_comm": False},
        }
        engine, _, loader, _ = cluster_ds.initialize(
            model=model, config=config, dataset=samples, plan=plan, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
        )
        watch = GradientWatch(engine.engine.module, engine.engine.device)
        watch.begin()
        micro = []
        for batch in loader:
            micro.append([(int(r), float(w)) for r, w in zip(batch["row"], batch["sample_weight"], strict=True)])
            engine.backward(engine(batch))
            watch.next_micro_batch()
            if engine.step():
                break
        found = watch.end()
        out[stage] = (found.cosines, found.gradient_diversity, found.num_gradients, micro)
        engine.engine.destroy()
    return out


def gradient_of(samples, rows):
    """Of 2 x sum of w l / 8 in float64, flat."""
    model = tiny_llama().double()
    total = 0.0
    for row, weight in rows:
        ids, labels = (torch.tensor(samples[row][k]) for k in ("input_ids", "labels"))
        total = total + weight * F.cross_entropy(model(input_ids=ids[None]).logits[0, :-1], labels[1:], ignore_index=-100)
    (2 * total / 8).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_cosines_and_diversity():
    ranks = run_on_ranks(watched, 2)
    samples = random_samples(16, seed=5)
    for stage in (0, 1, 2, 3):
        parts = [[gradient_of(samples, rows) for rows in found[stage][3]] for found in ranks]
        mine, other = (torch.stack(p).sum(dim=0) for p in parts)
        cosine = float(mine @ other / mine.norm() / other.norm())
        squares = sum(float(g @ g) for p in parts for g in p)
        for cosines, diversity, number, _ in (found[stage] for found in ranks):
            assert cosines[0][1] == cosines[1][0] == pytest.approx(cosine, abs=1e-5)  # not compressed: few parameters
            assert diversity == pytest.approx(squares / float((mine + other) @ (mine + other)), rel=1e-5) and number == 4
    assert abs(cosine) < 0.9
