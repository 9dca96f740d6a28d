import pytest
import torch

from cluster_ds.checkpoint import find_checkpoint, find_sound_checkpoint, set_aside_later, tag_of
from cluster_ds.distributed import Ranks
from cluster_ds.files import write_json


def checkpoint(folder, step, finished=True):
    path = folder / tag_of(step)
    path.mkdir(parents=True)
    (path / "weights.pt").write_bytes(b"12345")
    if finished:
        write_json(path / "manifest.json", {"step": step, "files": {"weights.pt": 5}})
    return path


def test_nothing_there(tmp_path):
    found = find_checkpoint(tmp_path / "checkpoints")
    assert found.step is None and found.notes == []


def test_the_newest_whole_one(tmp_path):
    checkpoint(tmp_path, 5)
    checkpoint(tmp_path, 10)
    assert find_checkpoint(tmp_path).step == 10


def test_an_interrupted_save_is_passed_over_even_if_it_is_all_there_is(tmp_path):
    checkpoint(tmp_path, 5, finished=False)
    found = find_checkpoint(tmp_path)
    assert found.step is None and found.notes == ["checkpoint step-00000005 passed over: its saving was interrupted"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda p: (p / "weights.pt").write_bytes(b"1234"), "weights.pt has 4 bytes instead of 5"),
        (lambda p: (p / "weights.pt").unlink(), "weights.pt is missing"),
        (lambda p: (p / "manifest.json").write_text("{"), "manifest.json is not readable"),
    ],
)
def test_damage_is_passed_over_with_a_reason_and_refused_when_nothing_else_is_left(tmp_path, damage, reason):
    old = checkpoint(tmp_path, 5)
    damage(checkpoint(tmp_path, 10))
    found = find_checkpoint(tmp_path)
    assert found.step == 5 and found.notes == [f"checkpoint step-00000010 passed over: {reason}"]
    damage(old)
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="no whole checkpoint to resume from; nothing was changed") as error:
        find_checkpoint(tmp_path)
    assert str(error.value).count(reason) == 2
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before


def test_going_back_to_an_older_one(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (5, 10, 15):
        checkpoint(folder, step)
    assert find_checkpoint(folder, "step-00000005").step == find_checkpoint(folder, str(folder / tag_of(5))).step == 5
    with pytest.raises(ValueError, match="--resume step-00000007: no such checkpoint in .*, which has step-00000005, step-00000010"):
        find_checkpoint(folder, "step-00000007")
    assert [p.name for p in set_aside_later(folder, 5)] == ["set-aside-step-00000010", "set-aside-step-00000015"]
    assert find_checkpoint(folder).step == 5


def test_a_flipped_bit_is_found_before_it_is_loaded(tmp_path):
    """The sizes are right; only reading the files tells."""
    for step in (5, 10):
        path = tmp_path / tag_of(step)
        path.mkdir()
        torch.save({"weight": torch.arange(1000.0)}, path / "states.pt")
        write_json(path / "manifest.json", {"step": step, "files": {"states.pt": (path / "states.pt").stat().st_size}})
    ranks = Ranks(0, 1, 0)
    assert find_sound_checkpoint(tmp_path, None, ranks).step == 10
    file = tmp_path / tag_of(10) / "states.pt"
    data = bytearray(file.read_bytes())
    data[data.index(torch.arange(500.0, 502.0).numpy().tobytes())] ^= 1
    file.write_bytes(data)
    found = find_sound_checkpoint(tmp_path, None, ranks)
    assert found.step == 5 and "checkpoint step-00000010 passed over: states.pt: " in found.notes[0]
    assert "does not match its checksum" in found.notes[0]
    with pytest.raises(ValueError, match="--resume step-00000010: .* is not whole: states.pt: .* does not match its checksum"):
        find_sound_checkpoint(tmp_path, "step-00000010", ranks)
