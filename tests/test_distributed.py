import os
import time

import pytest

from cluster_ds import distributed


@pytest.fixture
def no_compiler(monkeypatch):
    """The build itself is not what these tests are about."""
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "create_op_builder", lambda self, name: None)


def lock_in(folder, age_s):
    lock = folder / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)
    return lock


def test_a_stale_lock_in_our_folder_is_removed_with_a_message(tmp_path, monkeypatch, capfd, no_compiler):
    lock = lock_in(tmp_path / "cluster_ds" / "extensions", age_s=1)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parent.parent))
    distributed.build_cpu_communication()
    assert not lock.exists() and "removing the stale build lock" in capfd.readouterr().err


def test_a_lock_in_a_shared_folder_is_named_not_waited_for(tmp_path, monkeypatch, no_compiler):
    lock = lock_in(tmp_path / "shared", age_s=30)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parent.parent))
    with pytest.raises(ValueError, match="another program compiles there, or was killed doing so; delete the file"):
        distributed.build_cpu_communication()
    assert lock.exists()


def test_hash_to_int_fits_a_signed_64_bit_integer():
    assert distributed.hash_to_int("f" * 32) == 2**60 - 1


def test_shares_end_when_another_rank_has_failed():
    from datetime import timedelta

    import torch.distributed as dist

    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    mine, other = (distributed.Ranks(rank, 2, rank) for rank in (0, 1))
    mine._store = other._store = store
    numbers = mine.shares(5)
    assert next(numbers) == 0 and next(other.shares(5)) == 1 and next(numbers) == 2
    other._tell("the disk is full")
    with pytest.raises(distributed.PeerError, match="rank 1: the disk is full"):
        next(numbers)
