"""Text becomes the same tokens on every rank, through a cache that is never seen half-written."""

import hashlib
import math
import multiprocessing
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_3d.data import text_cache
from lightning_3d.data.text import TextDataModule
from lightning_3d.data.text_files import find_text_files, split_held_out
from lightning_3d.data.tokenizer import END_OF_TEXT, train_tokenizer
from lightning_3d.errors import DataError


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for number in range(10):
        place = folder / "deep" if number % 2 else folder
        (place / f"{number}.txt").write_text(
            f"Chapter {number}: naïve façades — {'the same old story ' * (5 + number)}"
        )
    return folder


@pytest.fixture
def build(texts, tmp_path):
    def build(**changes):
        settings = {"files": [f"{texts}/**/*.txt"], "vocab_size": 300, "sequence_length": 8, "global_batch_size": 4}
        return TextDataModule(**{**settings, "cache_dir": tmp_path / "cache", "validation_fraction": 0.2, **changes})

    return build


def prepared(data):
    data.prepare_data()
    data.setup()
    return data


def streams(data):
    cache = text_cache.open_entry(data._entry_folder())
    return cache.train.tolist(), cache.validation.tolist()


def entries(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock")


@pytest.fixture
def builds(monkeypatch, tmp_path):
    """A file that gets a byte for each time that an entry is built, and a build that takes long enough to be met."""
    log, write = tmp_path / "builds", text_cache._write_entry
    log.touch()

    def slow(*args, **kwargs):
        with log.open("a") as file:
            file.write("x")
        time.sleep(0.3)
        write(*args, **kwargs)

    monkeypatch.setattr(text_cache, "_write_entry", slow)
    return log


def at_once(function, *, count):
    """Call it in several processes that start together; the exit codes."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(count)

    def start():
        barrier.wait(30)
        function()

    processes = [context.Process(target=start) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    return [process.exitcode for process in processes]


def test_rows_decode_to_the_files_in_order(build):
    data = prepared(build())
    for part, files in zip(streams(data), data.split_files(), strict=True):
        end = data.tokenizer.token_to_id(END_OF_TEXT)
        documents, current = [], []
        for token in part:
            if token == end:
                documents.append(data.tokenizer.decode(current))
                current = []
            else:
                current.append(token)
        assert documents == [file.path.read_text() for file in files] and not current


def test_every_token_of_the_training_text_is_in_a_batch(build):
    data = prepared(build(global_batch_size=1))
    seen = Counter(int(token) for batch in data.train_dataloader() for token in batch["tokens"][0, 1:])
    expected = Counter(streams(data)[0][1:])
    assert all(seen[token] >= count for token, count in expected.items())
    assert sum(seen.values()) - sum(expected.values()) < 8  # only the last row repeats


def test_held_out_files_are_disjoint_and_the_same_wherever_the_folder_lies(build, texts, tmp_path):
    train, held_out = build().split_files()
    names = [{file.name for file in part} for part in (train, held_out)]
    assert [len(part) for part in names] == [8, 2]
    assert not names[0] & names[1]
    shutil.copytree(texts, tmp_path / "elsewhere")
    moved = build(files=[str(path) for path in (tmp_path / "elsewhere").rglob("*.txt")])
    assert [{file.name for file in part} for part in moved.split_files()] == names
    assert [{file.name for file in part} for part in build(seed=1).split_files()] != names


@pytest.mark.parametrize(("fraction", "count"), [(0.001, 1), (0.5, 5), (0.999, 9)])
def test_each_side_gets_at_least_one_file(build, fraction, count):
    train, held_out = build(validation_fraction=fraction).split_files()
    assert (len(train), len(held_out)) == (10 - count, count)


def test_the_standard_library_s_own_sources_are_the_default(tmp_path):
    data = TextDataModule(max_bytes=100_000, cache_dir=tmp_path)
    train, held_out = data.split_files()
    root = Path(sysconfig.get_path("stdlib"))
    assert all(file.path.is_relative_to(root) and file.path.suffix == ".py" for file in train + held_out)
    assert not any({"site-packages", "test", "tests"} & set(file.path.parts) for file in train + held_out)
    assert 80_000 < sum(file.size_bytes for file in train + held_out) <= 100_000


def test_an_entry_is_built_once_and_reused(build, builds, tmp_path):
    first, second = prepared(build()), prepared(build(sequence_length=5, global_batch_size=2))
    assert builds.read_text() == "x"
    assert len(entries(tmp_path)) == 1
    assert streams(first) == streams(second)
    assert first.vocab_size == second.vocab_size == first.tokenizer.get_vocab_size() <= 300


@pytest.mark.parametrize("change", ["text", "setting"])
def test_a_changed_file_or_setting_makes_another_entry(build, builds, texts, tmp_path, change):
    prepared(build())
    if change == "text":
        (texts / "0.txt").write_text("Something else entirely, and long enough for a row. " * 3)
        prepared(build())
    else:
        prepared(build(vocab_size=280))
    assert builds.read_text() == "xx"
    assert len(entries(tmp_path)) == 2


def test_processes_that_start_at_once_build_one_entry(build, builds, tmp_path):
    assert at_once(lambda: prepared(build()), count=3) == [0, 0, 0]
    assert builds.read_text() == "x"
    assert len(entries(tmp_path)) == 1
    prepared(build())
    assert builds.read_text() == "x"


def test_without_locks_each_builds_and_one_whole_entry_stays(build, builds, monkeypatch, tmp_path):
    @contextmanager
    def no_lock(path):
        yield False

    monkeypatch.setattr(text_cache, "_locked", no_lock)
    assert at_once(lambda: prepared(build()), count=2) == [0, 0]
    assert builds.read_text() == "xx"
    assert len(entries(tmp_path)) == 1
    prepared(build())
    assert builds.read_text() == "xx"


def test_a_slower_builder_leaves_the_whole_entry_where_it_is(build):
    folder = prepared(build())._entry_folder()
    late, first = folder.with_suffix(".new-late"), folder.stat().st_ino
    shutil.copytree(folder, late)
    text_cache._commit(late, folder)
    assert folder.stat().st_ino == first


@pytest.mark.parametrize("part", ["train.npy", "validation.npy", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_broken_entry_is_rebuilt(build, part, damage, tmp_path):
    data = prepared(build())
    whole, file = streams(data), data._entry_folder() / part
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        flipped = bytes([*content[:-4], content[-4] ^ 1, *content[-3:]])
        file.write_bytes(content[: len(content) // 2] if damage == "cut" else flipped)
    again = prepared(build())
    assert streams(again) == whole
    assert (again._entry_folder() / part).read_bytes() == content
    assert len(entries(tmp_path)) == 1


def test_what_a_killed_build_left_is_never_read_and_is_cleared(build, tmp_path):
    data = build()
    half = data._entry_folder().with_suffix(".new-killed")
    half.mkdir(parents=True)
    (half / "train.npy").write_bytes(b"half")
    with pytest.raises(DataError, match=r"Call prepare_data\(\) first"):
        data.setup()
    prepared(data)
    assert entries(tmp_path) == [data._entry_folder().name]


def test_a_failed_build_leaves_nothing(build, texts, tmp_path):
    (texts / "3.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(DataError, match=r"3\.txt is not UTF-8 text: byte 3 is 0xe9"):
        build().prepare_data()
    assert entries(tmp_path) == []


def test_unigram_loss_equals_counting_by_hand(build):
    data = prepared(build())
    train = Counter(streams(data)[0])
    total = sum(train.values()) + data.vocab_size
    targets = [int(token) for batch in data.val_dataloader() for row in batch["tokens"] for token in row[1:]]
    by_hand = -sum(math.log((train[token] + 1) / total) for token in targets) / len(targets)
    assert data.unigram_loss() == pytest.approx(by_hand, rel=1e-12)


def test_each_rank_loads_its_share_of_the_global_batch(build):
    data = prepared(build(global_batch_size=6))
    data.trainer = SimpleNamespace(strategy=SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 3, "rank": 0}))
    assert next(iter(data.train_dataloader()))["tokens"].shape == (2, 9)
    data.trainer.strategy.distributed_sampler_kwargs["num_replicas"] = 4
    with pytest.raises(DataError, match="global_batch_size to 4 or 8"):
        data.train_dataloader()


def test_shuffling_follows_the_seed_alone(build):
    def order(**settings):
        data = prepared(build(**settings))
        torch.manual_seed(len(settings))
        return torch.cat([batch["tokens"] for batch in data.train_dataloader()]).tolist()

    assert order() == order(shuffle=True) != order(shuffle=False)
    assert order(shuffle=False)[0] == streams(build())[0][:9]


def test_loader_workers_give_the_same_rows(build):
    data, with_workers = prepared(build()), prepared(build(num_workers=1))
    expected = [batch["tokens"] for batch in data.val_dataloader()]
    actual = [batch["tokens"] for batch in with_workers.val_dataloader()]
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))


def test_a_fork_after_preparing_uses_the_tokenizer_without_a_warning(build, texts, tmp_path):
    script = f"""
import multiprocessing, os
from lightning_3d.data.text import TextDataModule
data = TextDataModule([{str(texts)!r} + "/**/*.txt"], vocab_size=300, cache_dir={str(tmp_path / "fresh")!r})
data.prepare_data()
tokenizer = data.tokenizer
child = multiprocessing.get_context("fork").Process(target=lambda: tokenizer.encode_batch(["a b"] * 100))
child.start()
child.join(30)
assert child.exitcode == 0, child.exitcode
assert "TOKENIZERS_PARALLELISM" not in os.environ
"""
    environment = {k: v for k, v in os.environ.items() if k != "TOKENIZERS_PARALLELISM"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "fork" not in done.stderr


@pytest.mark.parametrize(("set_by_user", "while_training"), [(None, "false"), ("true", "true")])
def test_the_tokenizer_s_threads_are_off_while_it_trains_unless_the_user_says_so(
    monkeypatch, set_by_user, while_training
):
    name, seen = "TOKENIZERS_PARALLELISM", []
    monkeypatch.delenv(name, raising=False)
    if set_by_user:
        monkeypatch.setenv(name, set_by_user)

    def texts():
        seen.append(os.environ.get(name))
        yield "some text"

    train_tokenizer(texts(), vocab_size=257)
    assert seen == [while_training]
    assert os.environ.get(name) == set_by_user


def test_two_trainings_give_the_same_tokenizer(build, tmp_path):
    digests = []
    for cache in ("one", "two"):
        data = prepared(build(cache_dir=tmp_path / cache))
        digests.append(hashlib.sha256((data._entry_folder() / "tokenizer.json").read_bytes()).hexdigest())
    assert digests[0] == digests[1]


def test_tokens_are_mapped_not_read(build):
    cache = text_cache.open_entry(prepared(build())._entry_folder())
    assert isinstance(cache.train, np.memmap) and cache.train.dtype == np.uint16


def test_one_file_cannot_be_held_out_from_itself(build, texts):
    with pytest.raises(DataError, match=r"only one: .*0\.txt"):
        build(files=[texts / "0.txt"]).prepare_data()
    with pytest.raises(DataError, match="raise max_bytes"):
        build(max_bytes=200).prepare_data()
    with pytest.raises(DataError, match="max_bytes=3 is less than the smallest file"):
        build(max_bytes=3).prepare_data()


def test_a_file_named_twice_is_read_once(texts):
    files = find_text_files([texts / "0.txt", f"{texts}/*.txt", str(texts / "2.txt")])
    assert [file.name for file in files] == ["0.txt", "2.txt", "4.txt", "6.txt", "8.txt"]
    assert len(split_held_out(files, validation_fraction=0.2, seed=0)[0]) == 4


def test_an_unusable_cache_folder_is_refused(build, texts):
    with pytest.raises(DataError, match="cache_dir="):
        build(cache_dir=texts / "0.txt").prepare_data()


def test_an_empty_file_is_refused(build, texts):
    (texts / "4.txt").write_text("")
    with pytest.raises(DataError, match=r"4\.txt is empty"):
        build().prepare_data()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"files": ["nothing/*.txt"]}, r"'nothing/\*\.txt' matches no file"),
        ({"files": "texts"}, "must be a list"),
        ({"files": []}, "must be a list"),
        ({"max_bytes": 0}, "max_bytes=0"),
        ({"vocab_size": 256}, "vocab_size=256 is not a whole number of at least 257"),
        ({"sequence_length": 0}, "sequence_length=0"),
        ({"sequence_length": 100_000}, "train files: The text has .* sequence_length="),
        ({"sequence_length": 150}, "validation files: The text has"),
        ({"global_batch_size": 1.5}, "global_batch_size=1.5"),
        ({"global_batch_size": 10_000}, "Set global_batch_size="),
        ({"validation_fraction": 0}, "validation_fraction=0"),
        ({"num_workers": -1}, "num_workers=-1"),
        ({"seed": None}, "seed=None"),
    ],
)
def test_bad_settings_are_refused_by_the_field_s_name(build, settings, says):
    with pytest.raises(DataError, match=says):
        prepared(build(**settings)).train_dataloader()
