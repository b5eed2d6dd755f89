"""Reading rows: every kind of source, and every bad row located."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from loguru import logger

from trainer.config.data import SourceConfig
from trainer.data.rows import Conversation, RowError, Text, detect_format, parse_row
from trainer.data.sources import open_source
from trainer.errors import DataError


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def texts(path, **settings):
    return [row.value["text"] for row in open_source(SourceConfig(path=str(path), **settings))]


def test_jsonl_rows_are_numbered_and_located(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}, "", "{broken", "[1]", {"text": "ü"}])
    rows = list(open_source(SourceConfig(path=str(path))))
    assert [row.number for row in rows] == [0, 1, 2, 3]
    assert [row.where for row in rows] == [f"{path}:{line}" for line in (1, 3, 4, 5)]  # the blank line is no row
    assert rows[0].value == {"text": "x"} and rows[3].value == {"text": "ü"}
    assert "invalid JSON" in rows[1].error and "column 2" in rows[1].error
    assert "expected a JSON object, found list" in rows[2].error


def test_bytes_that_are_not_utf8_and_deep_nesting_are_bad_rows(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "bom"}\n{"text": "\xff"}\n' + b"[" * 100_000 + b"\n")
    rows = list(open_source(SourceConfig(path=str(path))))
    assert rows[0].value == {"text": "bom"}
    assert "not UTF-8" in rows[1].error and "nested" in rows[2].error


def test_a_number_too_long_for_python_is_a_bad_row(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": %s}\n{"text": "good"}\n' % ("9" * 5000))
    bad, good = open_source(SourceConfig(path=str(tmp_path / "a.jsonl")))
    assert bad.value is None and "invalid JSON" in bad.error
    assert good.value == {"text": "good"}


@pytest.mark.parametrize("path", ["x" * 5000, "a\0b.jsonl", "~nobody-of-this-name/a.jsonl"])
def test_names_that_no_file_can_have_are_errors(path):
    with pytest.raises(DataError, match="cannot be opened: .*correct the path"):
        open_source(SourceConfig(path=path))


def test_parquet_rows_are_located_and_lose_nothing(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None}]},
        {"messages": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    read = list(open_source(SourceConfig(path=str(path))))
    assert [row.value for row in read] == rows
    assert [row.where for row in read] == [f"{path}: row 0", f"{path}: row 1"]


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", [{"text": "3"}])
    write_jsonl(tmp_path / "a" / "z.jsonl", [{"text": "1"}, {"text": "2"}])
    pq.write_table(pa.table({"text": ["4"]}), tmp_path / "c.parquet")
    write_jsonl(tmp_path / ".cache" / "hidden.jsonl", [{"text": "no"}])
    (tmp_path / "README.md").write_text("no data")
    assert texts(tmp_path) == ["1", "2", "3", "4"]
    assert [row.number for row in open_source(SourceConfig(path=str(tmp_path)))] == [0, 1, 2, 3]


def test_saved_data_sets_and_their_splits(tmp_path):
    from datasets import Dataset, DatasetDict

    train, test = Dataset.from_dict({"text": ["a", "b"]}), Dataset.from_dict({"text": ["c"]})
    train.with_format("numpy").save_to_disk(str(tmp_path / "one"))
    DatasetDict(train=train, test=test).save_to_disk(str(tmp_path / "both"))
    assert texts(tmp_path / "one") == ["a", "b"]
    assert texts(tmp_path / "both", split="test") == ["c"]
    with pytest.raises(DataError, match="no split 'dev'; it has train, test"):
        open_source(SourceConfig(path=str(tmp_path / "both"), split="dev"))
    (row,) = open_source(SourceConfig(path=str(tmp_path / "both"), split="test"))
    assert row.where == f"{tmp_path / 'both'}[test]: row 0"


def test_other_local_folders_go_through_load_dataset(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "csv"
    folder.mkdir()
    (folder / "train.csv").write_text("text\none\ntwo\n")
    assert texts(folder) == ["one", "two"]


def test_halves_of_one_split_are_not_taken_for_each_other(tmp_path, monkeypatch):
    """Both have as many rows, of the same files; by their hash tokens are found again in the cache."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "csv"
    folder.mkdir()
    (folder / "train.csv").write_text("text\none\ntwo\nthree\nfour\n")
    halves = {"train[:50%]": ["one", "two"], "train[50%:]": ["three", "four"]}
    assert {split: texts(folder, split=split) for split in halves} == halves
    first, second = (open_source(SourceConfig(path=str(folder), split=split)).content_hash() for split in halves)
    assert first != second
    assert first == open_source(SourceConfig(path=str(folder), split="train[:50%]")).content_hash()


@pytest.mark.parametrize("name", ["nobody/nothing", "nothing"])
def test_an_unreachable_hub_is_an_error_with_a_way_out(name):
    with pytest.raises(DataError, match=rf"cannot load data set {name}, split 'train'(.|\n)*save_to_disk folder"):
        open_source(SourceConfig(path=name))


@pytest.mark.parametrize("path", ["./none.jsonl", "none.parquet", "/no/where", "~/no-such-folder", "a/b/c"])
def test_a_missing_path_is_not_looked_up_on_the_hub(path):
    with pytest.raises(DataError, match="does not exist"):
        open_source(SourceConfig(path=path))


def test_other_files_empty_folders_and_broken_parquet_are_errors(tmp_path):
    (tmp_path / "a.csv").write_text("text\n")
    with pytest.raises(DataError, match="must end in .jsonl or .parquet"):
        open_source(SourceConfig(path=str(tmp_path / "a.csv")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="folder is empty"):
        open_source(SourceConfig(path=str(tmp_path / "empty")))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        list(open_source(SourceConfig(path=str(tmp_path / "a.parquet"))))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (gzip.compress(b'{"text": "x"}\n'), "gzip-compressed: decompress it"),
        (b"\x28\xb5\x2f\xfd\0\0", "zstd-compressed"),
        ('{"text": "x"}\n'.encode("utf-16"), "UTF-16 text: convert it"),
        (b"PAR1\0\0", "a Parquet file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS.*git lfs pull"),
    ],
)
def test_files_that_are_no_text_at_all_are_told_once_and_whole(tmp_path, content, what):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=f"a.jsonl holds no JSON lines; it is .*{what}"):
        list(open_source(SourceConfig(path=str(tmp_path / "a.jsonl"))))


@pytest.mark.parametrize("text", ['[{"text": "a"}]', '[\n {"text": "a"}\n]'])
def test_a_json_array_is_told_from_json_lines(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    first = next(iter(open_source(SourceConfig(path=str(tmp_path / "a.jsonl")))))
    assert "write one object per line" in first.error


def test_a_key_that_comes_twice_is_a_bad_row(tmp_path):
    """JSON readers keep the last one, and so lose the first without a word."""
    nested = '{"messages": [{"role": "user", "content": "a", "content": "b"}]}'
    path = write_jsonl(tmp_path / "a.jsonl", ['{"text": "a", "text": "b"}', nested, {"text": "good"}])
    rows = list(open_source(SourceConfig(path=str(path))))
    assert [row.value for row in rows] == [None, None, {"text": "good"}]
    assert "key 'text' comes twice" in rows[0].error and "key 'content' comes twice" in rows[1].error


def test_links_that_lead_nowhere_and_what_is_no_file_are_told(tmp_path):
    """A folder must not lose a file because the link to it broke."""
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match="a.jsonl is a link to .*gone.jsonl, which does not exist"):
        open_source(SourceConfig(path=str(tmp_path / "a.jsonl")))
    write_jsonl(tmp_path / "folder" / "a.jsonl", [{"text": "x"}])
    (tmp_path / "folder" / "b.jsonl").symlink_to(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match="b.jsonl is a link to .*gone.jsonl, which does not exist"):
        open_source(SourceConfig(path=str(tmp_path / "folder")))
    with pytest.raises(DataError, match="neither a file nor a folder"):
        open_source(SourceConfig(path="/dev/null"))


def test_data_that_a_folder_leaves_out_are_told(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    (tmp_path / "b.jsonl.gz").write_bytes(b"")
    (tmp_path / "README.md").write_text("no data")
    messages: list[str] = []
    sink = logger.add(messages.append, level="WARNING", format="{message}")
    try:
        assert texts(tmp_path) == ["x"]
    finally:
        logger.remove(sink)
    assert len(messages) == 1 and "left out 1 of other kinds, such as b.jsonl.gz" in messages[0]


def test_a_parquet_row_that_is_no_text_spares_its_neighbours(tmp_path):
    offsets, data = pa.py_buffer(np.array([0, 2, 4, 6], np.int32).tobytes()), pa.py_buffer(b"ab\xff\xfecd")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": pa.Array.from_buffers(pa.string(), 3, [None, offsets, data])}), path)
    rows = list(open_source(SourceConfig(path=str(path))))
    assert [row.value for row in rows] == [{"text": "ab"}, None, {"text": "cd"}]
    assert "cannot be read" in rows[1].error and rows[1].where == f"{path}: row 1"


def test_parquet_columns_that_no_format_has_are_not_read(tmp_path):
    """Such as a time that Python cannot hold."""
    times = pa.array([2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["x"], "time": times}), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ["x"]


@pytest.mark.parametrize("damage", ["state.json", "dataset_info.json", "data-00000-of-00001.arrow"])
def test_a_damaged_data_set_folder_is_an_error(tmp_path, damage):
    from datasets import Dataset

    Dataset.from_dict({"text": ["x"] * 20}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / damage).write_bytes(b"{")
    with pytest.raises(DataError, match="not a readable data set folder|cannot be read"):
        list(open_source(SourceConfig(path=str(tmp_path / "saved"))))


def test_a_data_set_that_is_a_program_is_an_error(tmp_path):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "corpus.py").write_text("import datasets\n")
    with pytest.raises(DataError, match="cannot load data set .*scripts"):
        open_source(SourceConfig(path=str(tmp_path / "corpus")))


def test_content_hash_follows_the_bytes_and_not_the_path(tmp_path):
    one = write_jsonl(tmp_path / "a.jsonl", [{"text": "x"}])
    two = write_jsonl(tmp_path / "b.jsonl", [{"text": "x"}])
    hashes = [open_source(SourceConfig(path=str(path))).content_hash() for path in (one, two)]
    assert hashes[0] == hashes[1]
    write_jsonl(two, [{"text": "y"}])
    assert open_source(SourceConfig(path=str(two))).content_hash() != hashes[0]


USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [], "text": ""}, "messages"),
        ({"prompt": "", "completion": ""}, "completion"),
        ({"text": "", "prompt": ""}, "text"),
    ],
)
def test_format_is_told_by_the_keys(row, expected):
    assert detect_format(row) == expected


@pytest.mark.parametrize(("row", "hint"), [({"a": 1}, "['a']"), ({"conversations": []}, "ShareGPT")])
def test_unknown_keys_are_named(row, hint):
    with pytest.raises(RowError) as error:
        detect_format(row)
    assert hint in str(error.value)


@pytest.mark.parametrize(
    ("row", "row_format", "reason"),
    [
        ({"body": "x"}, "text", "missing key 'text'"),
        ({"text": None}, "text", "missing key 'text'"),
        ({"text": 3}, "text", "must be a string, found int"),
        ({"text": " \n"}, "text", "is empty"),
        ({"text": "\ud800"}, "text", "surrogate"),
        ({"prompt": "x"}, "completion", "missing key 'completion'"),
        ({"prompt": "x", "completion": ""}, "completion", "'completion' is empty"),
        ({"prompt": "x", "completion": [REPLY]}, "completion", "both strings or both lists"),
        ({"messages": "hi"}, "messages", "must be a list of messages, found str"),
        ({"messages": []}, "messages", "'messages' is empty"),
        ({"messages": ["hi"]}, "messages", r"messages\[0\] must be an object"),
        ({"messages": [USER, {"role": "bot", "content": "x"}]}, "messages", r"messages\[1\]: unknown role 'bot'"),
        ({"messages": [{"content": "x"}]}, "messages", "unknown role None"),
        ({"messages": [{"role": "user"}]}, "messages", "missing key 'content'"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, "messages", "missing key 'content'"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages", "must be a string, found list"),
        ({"messages": [USER], "tools": "{"}, "messages", "'tools' is not JSON"),
        ({"messages": [USER], "tools": "{}x"}, "messages", "'tools' is not JSON"),
        ({"messages": [USER], "tools": "[" * 100_000}, "messages", "'tools' is not JSON .nested too deeply"),
        ({"messages": [USER], "tools": "9" * 5000}, "messages", "'tools' is not JSON"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages", "unknown role"),
        ({"messages": [USER], "tools": {"a": 1}}, "messages", "'tools' must be a list of objects"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"a": 1}]}]}, "messages", "a function with a name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
            "arguments are not JSON",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[" * 100_000}]}]},
            "messages",
            "arguments are not JSON .nested too deeply",
        ),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row, row_format, reason):
    with pytest.raises(RowError, match=reason):
        parse_row(row, row_format, train_on_prompt=False)


def test_good_rows_of_each_format():
    assert parse_row({"text": "a"}, "text", train_on_prompt=False) == Text("a")
    pair = {"prompt": "ab", "completion": "c"}
    assert parse_row(pair, "completion", train_on_prompt=False) == Text("abc", 2)
    assert parse_row(pair, "completion", train_on_prompt=True) == Text("abc", 0)
    assert parse_row({"prompt": [USER], "completion": [REPLY]}, "completion", train_on_prompt=True) == Conversation(
        [USER, REPLY], None, 1, True
    )
    assert parse_row({"messages": [USER, REPLY], "tools": "[]"}, "messages", train_on_prompt=False) == Conversation(
        [USER, REPLY]
    )


def test_tools_and_calls_come_as_json_text_or_as_objects():
    as_text = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}, "id": None}
    row = {
        "messages": [USER, {"role": "assistant", "content": None, "tool_calls": [as_text], "name": None}],
        "tools": '[{"type": "function", "function": {"name": "f"}}]',
    }
    parsed = parse_row(row, "messages", train_on_prompt=False)
    assert isinstance(parsed, Conversation)
    assert parsed.tools == [{"type": "function", "function": {"name": "f"}}]
    assert parsed.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    }
