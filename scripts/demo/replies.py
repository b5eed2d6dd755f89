"""Asking a model directory something, with transformers and nothing of ours."""

from pathlib import Path
from typing import Any

from scripts.demo.assets import SYSTEM

MAX_NEW_TOKENS = 40


def replies(model_dir: Path, prompts: list[str]) -> list[str]:
    """The model's most likely reply to each prompt (greedy, so the same every time)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            output = model.generate(**encoded, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new = output[0, encoded["input_ids"].shape[1] :]
        text = " ".join(tokenizer.decode(new, skip_special_tokens=True).split()) or "(nothing)"
        answers.append(text if tokenizer.eos_token_id in new.tolist() else f"{text} ...")
    return answers
