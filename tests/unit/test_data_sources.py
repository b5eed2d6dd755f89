"""Reading rows: every kind of source, and every bad row located."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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
        ({"messages": [USER], "tools": {"a": 1}}, "messages", "'tools' must be a list of objects"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"a": 1}]}]}, "messages", "a function with a name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
            "arguments are not JSON",
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
