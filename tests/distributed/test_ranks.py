import pytest

from .ranks import run_on_ranks

pytestmark = pytest.mark.distributed


def waits(rank, world):
    import time

    import torch
    import torch.distributed as dist

    from cluster_ds.distributed import PeerError, Ranks, assert_ranks_agree

    ranks = Ranks(rank, world, rank, dist.distributed_c10d._get_default_store())
    out = {"main": ranks.on_main(lambda: (time.sleep(0.5), {"rank": rank})[1]), "gather": ranks.gather(rank * 10)}

    def fail():
        raise ValueError("no such data")

    try:
        ranks.on_main(fail)
    except (ValueError, PeerError) as error:
        out["failure"] = (type(error).__name__, str(error))
    assert_ranks_agree({"plan": "ab" * 16, "steps": 7}, torch.device("cpu"))
    try:
        assert_ranks_agree({"plan": "ab" * 16, "steps": 7 + rank}, torch.device("cpu"))
    except ValueError as error:
        out["disagree"] = str(error)
    return out


def test_rank_0_works_and_the_others_wait_or_hear_why_not():
    found = run_on_ranks(waits, 3)
    assert [f["main"] for f in found] == [{"rank": 0}] * 3
    assert [f["gather"] for f in found] == [[0, 10, 20]] * 3
    assert found[0]["failure"] == ("ValueError", "no such data")
    assert found[1]["failure"] == found[2]["failure"] == ("PeerError", "rank 0: no such data")
    assert [f["disagree"] for f in found] == [f"ranks disagree about steps (rank {r} has steps={7 + r})" for r in range(3)]
