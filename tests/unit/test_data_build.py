"""From files to a corpus: cache, bad rows, nothing to train on, held-out documents, several ranks."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from loguru import logger

from support.pool import run_on_ranks
from support.tokenizers import LLAMA3, MARKED, QWEN, byte_tokenizer
from trainer.config.data import DataConfig, FakeConfig, SourceConfig
from trainer.core.distributed import World, world_from_env
from trainer.data.build import TrainData, build_data
from trainer.data.loader import BatchLoader
from trainer.data.store import StoreWriter
from trainer.data.tokenize import cache_dir
from trainer.errors import DataError, TrainerError


def write_jsonl(path: Path, rows) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def chat(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def build(tmp_path, *paths, tokenizer=None, seed=0, **settings) -> TrainData:
    sources = tuple(SourceConfig(path=str(path)) for path in paths)
    config = DataConfig(**{"seq_len": 64, "cache_dir": str(tmp_path / "cache"), "sources": sources, **settings})
    return build_data(config, tokenizer=tokenizer or byte_tokenizer(QWEN), seed=seed, world=World())


@pytest.fixture
def messages():
    """What is logged while the test runs, as "LEVEL text"."""
    lines: list[str] = []
    sink = logger.add(lines.append, level="DEBUG", format="{level} {message}")
    yield lines
    logger.remove(sink)


def stores(tmp_path) -> list[Path]:
    return sorted((tmp_path / "cache" / "tokens").iterdir())


def test_every_format_becomes_documents(tmp_path):
    paths = [
        write_jsonl(tmp_path / "chat.jsonl", [chat("hi", "yo"), chat("a", "b")]),
        write_jsonl(tmp_path / "pairs.jsonl", [{"prompt": "1+1=", "completion": "2"}]),
        write_jsonl(tmp_path / "text.jsonl", [{"text": "plain text"}]),
    ]
    train = build(tmp_path, *paths).train
    tokenizer = byte_tokenizer()
    assert train.sample_ids(np.arange(len(train))) == ["0:0", "0:1", "1:0", "2:0"]
    decoded = []
    for document in range(len(train)):
        ids, mask = train.gather(np.array([document]))
        assert train.lengths[document] == ids.size and train.supervised[document] == mask[1:].sum()
        decoded.append((tokenizer.decode(ids), tokenizer.decode(ids[mask])))
    assert decoded[0][0].endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n")
    assert decoded[0][1] == "yo<|im_end|>"
    assert decoded[2] == ("1+1=2<|endoftext|>", "2<|endoftext|>")
    assert decoded[3] == ("plain text<|endoftext|>",) * 2


def test_what_a_killed_process_has_left_goes_and_what_another_one_writes_stays(tmp_path):
    place = tmp_path / "tokens" / "key"
    at_work, killed = StoreWriter(place).__enter__(), StoreWriter(place).__enter__()
    os.close(killed._lock_fd)  # as the kernel does
    with StoreWriter(place) as writer:
        writer.add([(np.arange(3, dtype=np.int32), np.ones(3, np.uint8))], [0])
        writer.commit("source", 0, ())
        held = sorted(path.name for path in (at_work._temporary, at_work._lock_path, place, writer._lock_path))
        assert sorted(path.name for path in place.parent.iterdir()) == held
    at_work.__exit__()
    assert list(place.parent.iterdir()) == [place]


def test_tokens_are_made_once_and_found_again(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("hi", "yo")] * 3)
    first = build(tmp_path, path).train
    assert len(stores(tmp_path)) == 1 and not list((tmp_path / "cache").rglob("*.tmp"))

    def forbidden(*_args):
        raise AssertionError("tokenized again")

    monkeypatch.setattr("trainer.data.tokenize.Encoder", forbidden)
    moved = tmp_path / "elsewhere.jsonl"
    shutil.copy(path, moved)
    again = build(tmp_path, moved, seq_len=32).train  # neither the path nor seq_len is part of the key
    assert again.fingerprint == first.fingerprint
    with pytest.raises(AssertionError, match="tokenized again"):
        build(tmp_path, path, train_on=("user",))


@pytest.mark.parametrize(
    "change",
    [
        {"train_on": ("user", "assistant")},
        {"tokenizer": byte_tokenizer(LLAMA3)},
        {"tokenizer": byte_tokenizer(QWEN, bos_token="<|begin_of_text|>")},
    ],
)
def test_what_changes_the_tokens_changes_the_key(tmp_path, change):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("hi", "yo")] * 3)
    build(tmp_path, path)
    build(tmp_path, path, **change)
    assert len(stores(tmp_path)) == 2


def test_a_changed_file_is_tokenized_again_and_changes_the_fingerprint(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("hi", "yo")])
    first = build(tmp_path, path).train
    stat = path.stat()
    write_jsonl(path, [chat("hi", "ya")])  # same size …
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # … and same time
    second = build(tmp_path, path).train
    assert second.fingerprint != first.fingerprint
    assert second.gather(np.array([0]))[0].tolist() != first.gather(np.array([0]))[0].tolist()


@pytest.mark.parametrize("damage", ["truncate", "remove", "meta"])
def test_a_damaged_cache_is_made_again(tmp_path, damage):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("hi", "yo")] * 3)
    first = build(tmp_path, path).train
    (store,) = stores(tmp_path)
    if damage == "truncate":
        with (store / "ids.bin").open("r+b") as file:
            file.truncate(8)
    elif damage == "remove":
        (store / "mask.bin").unlink()
    else:
        (store / "meta.json").write_text("{")
    second = build(tmp_path, path).train
    assert second.fingerprint == first.fingerprint
    assert second.gather(np.arange(3))[0].size == first.lengths.sum()


def test_an_unwritable_cache_is_an_error_with_a_way_out(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("hi", "yo")])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write tokenized data(.|\n)*data.cache_dir"):
        build(tmp_path, path, cache_dir=str(tmp_path / "file"))


def test_cache_dir_follows_the_config_then_xdg_then_home(monkeypatch):
    assert cache_dir(DataConfig(cache_dir="/x")) == Path("/x")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_dir(DataConfig()) == Path("/xdg/exact-trainer")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache_dir(DataConfig()) == Path("/home/somebody/.cache/exact-trainer")


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x", "a\0b"])
def test_a_cache_that_cannot_be_is_told(path):
    with pytest.raises(DataError, match="data.cache_dir = .*cannot be opened"):
        cache_dir(DataConfig(cache_dir=path))


def test_a_user_without_a_home_is_told(monkeypatch):
    """As in a container that runs under a number which the system does not know."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: (_ for _ in ()).throw(KeyError(number)))
    with pytest.raises(DataError, match="no home directory.*data.cache_dir"):
        cache_dir(DataConfig())


BAD_ROWS = [
    chat("hi", "yo"),
    "{broken",
    {"messages": [{"role": "bot", "content": "x"}]},
    {"text": "another format"},
    chat("ok", "fine"),
]


@pytest.mark.parametrize("line", [2, 3, 4])
def test_a_bad_row_is_fatal_and_located(tmp_path, line):
    path = write_jsonl(tmp_path / "a.jsonl", [BAD_ROWS[0], BAD_ROWS[line - 1]])
    with pytest.raises(DataError, match=rf"^{path}:2: (.|\n)*on_bad_row"):
        build(tmp_path, path)
    assert not list((tmp_path / "cache" / "tokens").iterdir())  # nothing half-made stays


def test_skipped_bad_rows_are_counted_and_located_also_from_the_cache(tmp_path, messages):
    path = write_jsonl(tmp_path / "a.jsonl", BAD_ROWS)
    for _ in range(2):
        messages.clear()
        train = build(tmp_path, path, on_bad_row="skip").train
        assert train.sample_ids(np.arange(len(train))) == ["0:0", "0:4"]  # numbers of the file
        (warning,) = [line for line in messages if line.startswith("WARNING")]
        assert "skipped 3 bad rows of 5" in warning
        for line in (2, 3, 4):
            assert f"{path}:{line}: " in warning
    with pytest.raises(DataError, match=f"{path}:2: invalid JSON"):
        build(tmp_path, path)  # the cache made under "skip" does not hide them from "fail"


def test_rows_are_located_where_they_lie_now_although_the_tokens_were_made_from_a_copy(tmp_path, messages):
    """The cache goes by content: a file that has moved, or a folder of the same files, finds the tokens of the old one."""
    for place in ("old", "new"):
        (tmp_path / place).mkdir()
        write_jsonl(tmp_path / place / "a.jsonl", [chat("ok", "fine")])
        write_jsonl(tmp_path / place / "b.jsonl", BAD_ROWS)
    build(tmp_path, tmp_path / "old", on_bad_row="skip")
    shutil.rmtree(tmp_path / "old")
    messages.clear()
    build(tmp_path, tmp_path / "new", on_bad_row="skip")
    said = "".join(messages)
    assert len(stores(tmp_path)) == 1  # no second tokenization
    assert all(f"{tmp_path / 'new' / 'b.jsonl'}:{line}: " in said for line in (2, 3, 4))
    assert f"data.sources[0] {tmp_path / 'new'}: 3 documents" in said and str(tmp_path / "old") not in said


def test_many_bad_rows_are_counted_and_the_first_shown(tmp_path, messages):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b"), *["{"] * 20])
    build(tmp_path, path, on_bad_row="skip")
    (warning,) = [line for line in messages if line.startswith("WARNING")]
    assert "skipped 20 bad rows of 21" in warning and "and 15 more" in warning


def test_a_bad_parquet_row_is_located(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["x", None, "y"]}), path)
    with pytest.raises(DataError, match=rf"^{path}: row 1: missing key 'text'"):
        build(tmp_path, path)
    train = build(tmp_path, path, on_bad_row="skip").train
    assert train.rows.tolist() == [0, 2]


def test_a_source_of_bad_rows_only_is_fatal_even_when_skipping(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["{"] * 3)
    with pytest.raises(DataError, match=r"all 3 rows are bad:(.|\n)*a.jsonl:1: invalid JSON"):
        build(tmp_path, path, on_bad_row="skip")
    with pytest.raises(DataError, match="no rows"):
        build(tmp_path, write_jsonl(tmp_path / "b.jsonl", []), on_bad_row="skip")


def test_i4_a_mask_of_zeros_is_fatal_and_counts_the_sources(tmp_path):
    good = write_jsonl(tmp_path / "good.jsonl", [chat("hi", "yo")])
    bad = write_jsonl(tmp_path / "bad.jsonl", [{"messages": [{"role": "user", "content": "nobody answers"}]}])
    with pytest.raises(DataError) as error:
        build(tmp_path, good, bad)
    for text in (r"nothing to train on in data.sources[1]", "good.jsonl: 3", "bad.jsonl: 0", "data.train_on"):
        assert text in str(error.value)


def test_i4_markers_around_nothing_are_fatal(tmp_path):
    wrong = MARKED.replace("message.role == 'assistant'", "message.role == 'model'")
    path = write_jsonl(tmp_path / "a.jsonl", [chat("hi", "yo")] * 3)
    with pytest.raises(DataError, match=r"nothing to train on(.|\n)*a.jsonl: 0\."):
        build(tmp_path, path, tokenizer=byte_tokenizer(wrong))


def test_i4_a_cut_that_leaves_nothing_is_fatal_and_says_what_there_was(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("a long question " * 20, "yes")] * 3)
    with pytest.raises(
        DataError, match=r"nothing to train on(.|\n)*seq_len = 64: .*a.jsonl: [1-9](.|\n)*raise data.seq_len"
    ):
        build(tmp_path, path)


def test_i4_documents_cut_to_nothing_are_left_out_and_counted(tmp_path, messages):
    path = write_jsonl(
        tmp_path / "a.jsonl", [chat("hi", "yo"), chat("a long question " * 20, "yes"), chat("a", "b " * 99)]
    )
    train = build(tmp_path, path).train
    assert train.sample_ids(np.arange(len(train))) == ["0:0", "0:2"]
    assert (train.supervised > 0).all()
    (line,) = [line for line in messages if "data.sources[0]" in line]
    assert "2 documents" in line and f"{train.supervised.sum()} supervised" in line
    assert "left out 1 documents" in line and "cut 1 documents" in line


def test_held_out_documents_are_chosen_by_seed_and_not_trained_on(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat(f"question {row}", "yo") for row in range(20)])

    def split(seed):
        data = build(tmp_path, path, val_documents=5, seed=seed)
        assert data.val is not None
        return set(data.train.rows.tolist()), set(data.val.rows.tolist()), data.train.fingerprint

    train, val, fingerprint = split(0)
    assert len(val) == 5 and len(train) == 15 and not train & val
    assert split(0) == (train, val, fingerprint)
    assert split(1)[1] != val and split(1)[2] != fingerprint
    assert build(tmp_path, path).train.fingerprint != fingerprint
    with pytest.raises(DataError, match="only 20 documents"):
        build(tmp_path, path, val_documents=20)


def test_val_sources_are_a_corpus_of_their_own(tmp_path):
    train = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b")] * 3)
    val = write_jsonl(tmp_path / "b.jsonl", [chat("c", "d")] * 2)
    data = build(tmp_path, train, val_sources=(SourceConfig(path=str(val)),))
    assert data.val is not None and len(data.train) == 3 and len(data.val) == 2
    assert build(tmp_path, train).val is None


def test_fake_documents_follow_their_config_and_seed():
    config = DataConfig(fake=FakeConfig(documents=2000, mean_tokens=50, sigma=0.5, vocab_size=17), seq_len=4096)

    def documents(seed):
        return build_data(config, tokenizer=None, seed=seed, world=World())

    data = documents(0)
    ids, mask = data.train.gather(np.arange(2000))
    assert ids.min() == 0 and ids.max() == 16 and mask.all()
    assert abs(data.train.lengths.mean() - 50) < 2
    assert abs(np.log(data.train.lengths).std() - 0.5) < 0.05
    assert data.val is not None and data.val.fingerprint != data.train.fingerprint
    assert data.val.gather(np.arange(3))[0][:20].tolist() != ids[:20].tolist()
    assert documents(0).train.fingerprint == data.train.fingerprint != documents(1).train.fingerprint
    same = DataConfig(fake=FakeConfig(documents=10, mean_tokens=8, sigma=0.0), seq_len=64)
    assert set(build_data(same, tokenizer=None, seed=0, world=World()).train.lengths) == {8}


def test_more_fake_tokens_than_the_pool_holds_share_it(monkeypatch):
    monkeypatch.setattr("trainer.data.fake.POOL_TOKENS", 1000)
    config = DataConfig(fake=FakeConfig(documents=100, mean_tokens=50), seq_len=4096)
    train = build_data(config, tokenizer=None, seed=0, world=World()).train
    ids, _ = train.gather(np.arange(100))
    assert ids.size == train.lengths.sum() > 1000


def test_missing_parts_are_told(tmp_path):
    with pytest.raises(DataError, match="no data"):
        build_data(DataConfig(), tokenizer=byte_tokenizer(), seed=0, world=World())
    config = DataConfig(sources=(SourceConfig(path="x.jsonl"),))
    with pytest.raises(DataError, match="need a tokenizer"):
        build_data(config, tokenizer=None, seed=0, world=World())


def _build_on_rank(path: str, caches: list[str]):
    """Fingerprint, this rank's rows of two batches, and whether this rank tokenized."""
    world = world_from_env()
    config = DataConfig(
        sources=(SourceConfig(path=path),), seq_len=64, batch_size=4, pack=False, cache_dir=caches[world.rank]
    )
    try:
        train = build_data(config, tokenizer=byte_tokenizer(QWEN), seed=0, world=world).train
    except TrainerError as error:
        return str(error)
    loader = BatchLoader(train, config, seed=0, rank=world.rank, world_size=world.size)
    ids = [micro.ids[0][0] for _ in range(2) for micro in loader.next_batch().micro_batches]
    return train.fingerprint, ids, str(train.stores[0].directory)


def test_rank_zero_tokenizes_and_the_others_read_its_cache(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat(f"question {row}", "yo") for row in range(12)])
    caches = [str(tmp_path / "shared"), str(tmp_path / "never-used")]
    one, two = run_on_ranks(_build_on_rank, 2, str(path), caches)
    assert one[0] == two[0] and one[2] == two[2]
    assert not set(one[1]) & set(two[1]) and len(one[1]) == len(two[1]) == 4
    assert not (tmp_path / "never-used").exists()


def test_an_error_on_rank_zero_is_raised_on_every_rank(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [chat("a", "b"), "{broken"])
    caches = [str(tmp_path / "cache")] * 2
    errors = run_on_ranks(_build_on_rank, 2, str(path), caches)
    assert all(f"{path}:2: invalid JSON" in error for error in errors)


def _build_in(folders: list[str]):
    """As above, on "nodes" that share no disk: every rank sees its own folder under the same absolute path."""
    back = os.getcwd()
    os.chdir(folders[world_from_env().rank])
    try:
        return _build_on_rank("/proc/self/cwd/a.jsonl", ["/proc/self/cwd/cache"] * len(folders))
    finally:
        os.chdir(back)


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="needs Linux's /proc")
def test_ranks_without_a_shared_disk_tokenize_for_themselves_and_must_agree(tmp_path):
    folders = [tmp_path / "node0", tmp_path / "node1"]
    for folder in folders:
        folder.mkdir()
        write_jsonl(folder / "a.jsonl", [chat(f"question {row}", "yo") for row in range(12)])
    one, two = run_on_ranks(_build_in, 2, [str(folder) for folder in folders])
    assert one[0] == two[0] and not set(one[1]) & set(two[1])
    assert all(len(list((folder / "cache" / "tokens").iterdir())) == 1 for folder in folders)
    write_jsonl(folders[0] / "a.jsonl", [chat(f"question {row}", "ya") for row in range(12)])
    errors = run_on_ranks(_build_in, 2, [str(folder) for folder in folders])
    assert all("rank 1 tokenized other documents" in error for error in errors)
