"""Worker: completions of the same prompts by the same weights, through our engine or transformers' generate."""

import json
import sys
from collections.abc import Callable

import torch

from benchmarks.cases import Case
from benchmarks.gate import Gate, Stopped
from trainer.config.model import ModelConfig
from trainer.models.base import CausalLM
from trainer.models.build import build_model
from trainer.rl.rollout import LocalEngine
from trainer.rl.types import Request, Sampling

Generate = Callable[[int], int]
"""Runs one round, whose number seeds the draws, and returns the new tokens."""


def prompts_of(count: int, samples: int, vocab_size: int) -> list[list[int]]:
    """Returns `count` prompts of 8 to 39 tokens, each `samples` times in a row."""
    generator = torch.Generator().manual_seed(0)
    lengths = [8 + 5 * number % 32 for number in range(count // samples)]
    prompts = [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return [prompt for prompt in prompts for _ in range(samples)]


def our_engine(model: CausalLM, prompts: list[list[int]], new_tokens: int) -> Generate:
    engine = LocalEngine(model, slots=len(prompts))
    sampling = Sampling(temperature=1.0)

    def generate(number: int) -> int:
        engine.update(number)  # as after every optimizer step
        requests = [Request(prompt, new_tokens, number * len(prompts) + i) for i, prompt in enumerate(prompts)]
        return sum(len(completion.ids) for completion in engine.generate(requests, sampling))

    return generate


def transformers_generate(model: CausalLM, case: Case, prompts: list[list[int]], new_tokens: int) -> Generate:
    """Padded on the left, as its documentation says; drawn at temperature 1, never stopped. It keeps no log-probabilities."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(case.model_dir())
    config.use_cache = True
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    theirs.load_state_dict(model.state_dict())
    theirs.eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = transformers.GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        eos_token_id=None,
    )

    def generate(number: int) -> int:
        torch.manual_seed(number)
        output = theirs.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
        return output[:, longest:].numel()

    return generate


def main() -> None:
    arguments = json.loads(sys.argv[1])
    case = Case.from_arguments(arguments["case"])
    gate = Gate(torch.set_num_threads)
    config = ModelConfig(name=str(case.model_dir()), random_init=True, dtype="float32")
    model = build_model(config, mesh=None, device=torch.device("cpu"), seed=0)
    prompts = prompts_of(arguments["prompts"], arguments["samples"], case.vocab_size)
    if arguments["form"] == "ours":
        generate = our_engine(model, prompts, arguments["new_tokens"])
    else:
        generate = transformers_generate(model, case, prompts, arguments["new_tokens"])
    number = 0
    try:
        while True:
            gate.before_step()
            gate.count(generate(number))
            number += 1
    except Stopped:
        pass


if __name__ == "__main__":
    main()
