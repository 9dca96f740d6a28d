"""Sketches of gradients: exact where nothing is compressed, and as near as they say where something is."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cluster_ds.diagnosis import GradientWatch


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_diversity_by_hand_where_nothing_is_compressed(alone):
    """Gradients (3, 4) and (-1, 2): 25 + 5 over |(2, 6)|^2 = 40."""
    module = torch.nn.Linear(2, 1, bias=False)
    watch = GradientWatch(module, torch.device("cpu"))
    watch.begin()
    for x in ([3.0, 4.0], [-1.0, 2.0]):
        module(torch.tensor([x])).sum().backward()
        watch.next_micro_batch()
    found = watch.end()
    assert found.gradient_diversity == pytest.approx(30 / 40) and found.num_gradients == 2
    assert found.cosines == [[pytest.approx(1.0)]] and found.mean_cosine is None and found.standard_error == 0.0
    module(torch.ones(1, 2)).sum().backward()
    assert float(watch.total.double().square().sum()) == pytest.approx(40)  # it looks no longer


def test_inner_products_of_compressed_gradients_keep_to_their_error():
    """Four hundred thousand elements in 65,521 places; 30 pairs of correlated, long-tailed vectors."""
    generator = np.random.default_rng(0)
    module = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(500, 600)), torch.nn.Parameter(torch.zeros(100_000))])
    errors = []
    for seed in range(30):
        watch = GradientWatch(module, torch.device("cpu"), seed)
        common = generator.standard_t(4, size=400_000)
        vectors = [common + generator.standard_t(4, size=400_000) for _ in range(2)]
        sketches = []
        for v in vectors:
            watch.begin()
            flat = torch.tensor(v, dtype=torch.float32)
            ((module[0].flatten() * flat[:300_000]).sum() + (module[1] * flat[300_000:]).sum()).backward()
            watch.next_micro_batch()
            for handle in watch.handles:
                handle.remove()
            sketches.append(watch.total.double())
        true = vectors[0] @ vectors[1] / np.linalg.norm(vectors[0]) / np.linalg.norm(vectors[1])
        errors.append(float(sketches[0] @ sketches[1] / sketches[0].norm() / sketches[1].norm()) - true)
    standard_error = (2 / watch.size) ** 0.5
    assert watch.size == 65_521 and np.sqrt(np.mean(np.square(errors))) < 1.3 * standard_error
    assert abs(np.mean(errors)) < 3 * standard_error / 30**0.5
