import multiprocessing
import os
import time

import pytest

from cluster_ds.files import commit_folder, hash_files, is_committed, read_json


def build(folder, delay=0.0):
    with commit_folder(folder, {"by": os.getpid()}) as part:
        (part / "data").write_text("x" * 1000)
        time.sleep(delay)
        (part / "more").write_text("y")


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), commit_folder(tmp_path / "a", {}) as part:
        (part / "half").write_text("x")
        assert not (tmp_path / "a").exists()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    build(tmp_path / "a")
    assert is_committed(tmp_path / "a") and read_json(tmp_path / "a" / "manifest.json") == {"by": os.getpid()}


def test_two_builders_of_one_folder_both_succeed(tmp_path):
    context = multiprocessing.get_context("spawn")
    builders = [context.Process(target=build, args=(tmp_path / "a", delay)) for delay in (0.2, 0.3, 0.2)]
    for b in builders:
        b.start()
    for b in builders:
        b.join()
    assert [b.exitcode for b in builders] == [0, 0, 0]
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert {p.name for p in (tmp_path / "a").iterdir()} == {"data", "more", "manifest.json"}


def test_a_killed_builder_leaves_nothing_that_is_read_and_its_leftovers_go(tmp_path):
    builder = multiprocessing.get_context("spawn").Process(target=build, args=(tmp_path / "a", 60))
    builder.start()
    while not list(tmp_path.glob("a.*.part/data")):
        time.sleep(0.01)
    builder.kill()
    builder.join()
    assert not is_committed(tmp_path / "a") and len(list(tmp_path.iterdir())) == 1
    build(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_replacing(tmp_path):
    for text in ("old", "new"):
        with commit_folder(tmp_path / "a", {}, replace=True) as part:
            (part / "file").write_text(text)
    assert (tmp_path / "a" / "file").read_text() == "new" and len(list(tmp_path.iterdir())) == 1


def test_hash_sees_content_and_names(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("x")
    b.write_text("x")
    assert hash_files([a]) != hash_files([b])
    before = hash_files([a])
    stat = a.stat()
    a.write_text("y")
    os.utime(a, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert hash_files([a]) != before  # size and time are not content
