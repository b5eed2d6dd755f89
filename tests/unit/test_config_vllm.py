"""What a config may ask of vLLM servers."""

import pytest

from trainer.config.load import load_config
from trainer.config.run import RLConfig
from trainer.errors import ConfigError

BASE = "--max-steps 2 --output-dir runs/x --model.name m --envs.0.name arithmetic --data.seq-len 64 --rl.max-new-tokens 8".split()


def loaded(text: str) -> RLConfig:
    return load_config(RLConfig, [*BASE, *text.split()]).config


def test_a_launched_server_and_given_ones():
    assert loaded("--engine.type vllm --engine.launch").engine.launch
    assert loaded("--engine.type vllm --engine.urls http://a:1,http://b:1").engine.urls == ("http://a:1", "http://b:1")


@pytest.mark.parametrize(
    "flags", ["--engine.type vllm", "--engine.type vllm --engine.launch --engine.urls http://a:1", "--engine.launch"]
)
def test_one_of_the_two_and_only_with_vllm(flags):
    with pytest.raises(ConfigError, match="engine.urls"):
        loaded(flags)


@pytest.mark.parametrize("cut", ["--rl.top-p 0.9", "--rl.top-k 5"])
def test_sampling_whose_logprobs_no_server_returns(cut):
    vllm = "--engine.type vllm --engine.launch"
    with pytest.raises(ConfigError, match="rl.temperature"):
        loaded(f"{vllm} {cut} --rl.temperature 0.7")
    with pytest.raises(ConfigError, match="val.temperature"):
        loaded(f"{vllm} {cut} --val.temperature 0.7")
    assert loaded(f"{vllm} {cut}").rl.temperature == 1
    assert loaded(f"{vllm} --rl.temperature 0.7 --val.temperature 0.5").rl.temperature == 0.7
    assert loaded(f"{cut} --rl.temperature 0.7").engine.type == "local"
