import json

import pytest

from support.models import write_config
from support.tokenizers import QWEN, byte_tokenizer
from trainer.config.model import ModelConfig
from trainer.errors import ModelError
from trainer.models.tokenizer import load_tokenizer, vocabulary_rows


def test_the_tokenizer_beside_the_model_or_elsewhere(tmp_path):
    write_config(tmp_path / "model")
    byte_tokenizer(QWEN).save_pretrained(tmp_path / "model")
    byte_tokenizer(QWEN, eos_token="<|im_end|>").save_pretrained(tmp_path / "other")
    beside = load_tokenizer(ModelConfig(name=str(tmp_path / "model")))
    other = load_tokenizer(ModelConfig(name=str(tmp_path / "model"), tokenizer=str(tmp_path / "other")))
    assert (beside.eos_token, other.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert beside.chat_template == QWEN
    assert beside("Hello there").input_ids == byte_tokenizer()("Hello there").input_ids


def test_a_chat_template_file_replaces_its_own(tmp_path):
    byte_tokenizer(QWEN).save_pretrained(tmp_path)
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(ModelConfig(name=str(tmp_path), chat_template=str(tmp_path / "mine.jinja")))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    with pytest.raises(ModelError, match="chat_template: .*absent.jinja cannot be read"):
        load_tokenizer(ModelConfig(name=str(tmp_path), chat_template=str(tmp_path / "absent.jinja")))


def test_a_missing_tokenizer_says_what_to_set(tmp_path):
    write_config(tmp_path)
    with pytest.raises(ModelError, match="(?s)holds no tokenizer.*model.tokenizer"):
        load_tokenizer(ModelConfig(name=str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(ModelConfig(name=str(tmp_path)))


@pytest.mark.parametrize("damage", ["cut", "", "[]", "merges", "model", "\udcff"])
def test_a_damaged_tokenizer_is_an_error(tmp_path, damage):
    """tokenizers raises a bare Exception over such files."""
    write_config(tmp_path)
    byte_tokenizer(QWEN).save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    text = path.read_text()
    if damage == "cut":
        text = text[: len(text) // 2]
    elif damage in ("merges", "model"):
        content = json.loads(text)
        if damage == "merges":
            content["model"]["merges"] = ["zz qq"]
        else:
            content["model"]["type"] = "Nonsense"
        text = json.dumps(content)
    else:
        text = damage
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match="holds no tokenizer that transformers can load"):
        load_tokenizer(ModelConfig(name=str(tmp_path)))


def test_ids_with_holes_have_rows(tmp_path):
    tokenizer = byte_tokenizer(QWEN)
    count = len(tokenizer)
    assert vocabulary_rows(tokenizer) == count
    write_config(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["added_tokens"].append(
        {"id": count + 20, "content": "<far>", "single_word": False, "lstrip": False, "rstrip": False}
        | {"normalized": False, "special": True}
    )
    content["model"]["vocab"]["<far>"] = count + 20
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    far = load_tokenizer(ModelConfig(name=str(tmp_path)))
    assert far.convert_tokens_to_ids("<far>") == count + 20 and len(far) < count + 20
    assert vocabulary_rows(far) == count + 21
    content["added_tokens"][-1]["id"] = content["model"]["vocab"]["<far>"] = 10**8
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ModelError, match="the id of token '<far>' is 100000000"):
        vocabulary_rows(load_tokenizer(ModelConfig(name=str(tmp_path))))


def test_which_directory_is_meant(tmp_path):
    with pytest.raises(ModelError, match="^model.tokenizer = '/nowhere/x' is not a directory"):
        load_tokenizer(ModelConfig(name=str(tmp_path), tokenizer="/nowhere/x"))


@pytest.mark.parametrize("eos", [2, [2, 5]])
def test_the_end_of_text_token_may_come_from_the_model(tmp_path, eos):
    tokenizer = byte_tokenizer(QWEN)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    write_config(tmp_path, eos_token_id=eos)
    assert load_tokenizer(ModelConfig(name=str(tmp_path))).eos_token_id == 2
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="no eos_token"):
        load_tokenizer(ModelConfig(name=str(tmp_path)))
