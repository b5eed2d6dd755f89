"""Checkpoints as other trainers write them, made with transformers and torch alone.

The layouts: `Trainer._save_checkpoint` of transformers 5 (model, optimizer.pt, scheduler.pt, trainer_state.json,
rng_state.pth, training_args.bin); `Accelerator.save_state` (model.safetensors, optimizer.bin, scheduler.bin,
random_states_0.pkl); prime-rl's AppState and torchtitan's flat FQN-keyed state, both through torch.distributed.checkpoint.
"""

import json
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.trainer_pt_utils import get_parameter_names

from support.runs import REPO

TINY = REPO / "configs/debug/assets/tiny-llama"
PATTERNS = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


def hf_model(model_dir: Path = TINY, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    config = transformers.AutoConfig.from_pretrained(model_dir)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def hf_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """As `Trainer.create_optimizer`."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], PATTERNS))
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if n in decayed], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n not in decayed], "weight_decay": 0.0},
    ]


class ForeignRun:
    """A few updates of transformers' own model on random tokens, with AdamW and a scheduler."""

    def __init__(
        self,
        *,
        weight_decay: float = 0.0,
        lr: float = 2e-3,
        groups: Callable[[nn.Module, float], list[dict[str, Any]]] = hf_groups,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        model_dir: Path = TINY,
    ):
        self.model = hf_model(model_dir)
        self.optimizer = torch.optim.AdamW(groups(self.model, weight_decay), lr=lr, betas=(0.9, 0.999), eps=1e-8)
        make = schedule or (lambda o: transformers.get_cosine_schedule_with_warmup(o, 2, 10))
        self.scheduler = make(self.optimizer)
        self.step = 0
        self.log: list[dict[str, Any]] = []

    def train(self, steps: int) -> "ForeignRun":
        for _ in range(steps):
            generator = torch.Generator().manual_seed(self.step)
            ids = torch.randint(0, self.model.config.vocab_size, (2, 24), generator=generator)
            self.model(input_ids=ids, labels=ids).loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.step += 1
            self.log.append({"step": self.step, "learning_rate": self.scheduler.get_last_lr()[0], "loss": 1.0})
        return self

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Returns parameter name -> {"weight", "exp_avg", "exp_avg_sq", "step"}."""
        return {
            name: {"weight": p.detach(), **self.optimizer.state.get(p, {})} for name, p in self.model.named_parameters()
        }

    # -- as others save it ---------------------------------------------------------------------------------------------

    def save_hf_trainer(self, path: Path, **state: Any) -> Path:
        self.model.save_pretrained(path)
        torch.save(self.optimizer.state_dict(), path / "optimizer.pt")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.save(self.scheduler.state_dict(), path / "scheduler.pt")
        torch.save({"cpu": torch.get_rng_state()}, path / "rng_state.pth")
        (path / "training_args.bin").write_bytes(pickle.dumps({"never": "read"}))
        values = {
            "epoch": 0.5,
            "global_step": self.step,
            "max_steps": 10,
            "train_batch_size": 2,
            "log_history": self.log,
            "num_input_tokens_seen": 0,
        }
        (path / "trainer_state.json").write_text(json.dumps(values | state, indent=2))
        return path

    def save_accelerate(self, path: Path, processes: int = 1) -> Path:
        from safetensors.torch import save_file

        path.mkdir(parents=True)
        tensors = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
        torch.save(self.optimizer.state_dict(), path / "optimizer.bin")
        scheduler = self.scheduler.state_dict()
        scheduler["last_epoch"] *= processes
        torch.save(scheduler, path / "scheduler.bin")
        (path / "random_states_0.pkl").write_bytes(pickle.dumps({"never": "read"}))
        return path

    def save_prime_rl(self, path: Path, **progress: int) -> Path:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self.model, [self.optimizer])
        counters = {"step": self.step, "total_tokens": 480, "total_samples": 10} | progress
        state = {
            "model": model,
            "optimizers": optimizer,
            "scheduler": self.scheduler.state_dict(),
            "progress": counters,
        }
        return save_dcp({"app": state}, path)

    def save_torchtitan(self, path: Path, **train_state: int) -> Path:
        """Names and row order as torchtitan's Llama has them: the inverse of its adapter's `to_hf`."""
        flat: dict[str, Any] = {}
        groups = {id(p): group for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self.model.named_parameters():
            theirs = titan_name(name)
            flat[theirs] = titan_rows(name, parameter.detach(), self.model.config)
            for entry, value in self.optimizer.state[parameter].items():
                moment = value if value.ndim == 0 else titan_rows(name, value, self.model.config)
                flat[f"optimizer.state.{theirs}.{entry}"] = moment
            for entry, value in groups[id(parameter)].items():
                if entry != "params":
                    flat[f"optimizer.param_groups.{theirs}.{entry}"] = value
        flat["lr_scheduler.last_epoch"] = self.scheduler.last_epoch
        flat["train_state.step"], flat["train_state.ntokens_seen"] = self.step, 480
        flat |= {f"train_state.{name}": value for name, value in train_state.items()}
        return save_dcp(flat, path)


def save_dcp(state: dict[str, Any], path: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


_TITAN = {
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def titan_name(name: str) -> str:
    top = {"model.embed_tokens.weight": "tok_embeddings.weight", "model.norm.weight": "norm.weight"}
    if name in top or name == "lm_head.weight":
        return top.get(name, name)
    _, layers, number, *rest = name.split(".")
    return f"{layers}.{number}.{_TITAN['.'.join(rest[:-1])]}.weight"


def titan_rows(name: str, tensor: Tensor, config: Any) -> Tensor:
    """torchtitan's `_reverse_permute`."""
    heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads if "k_proj" in name else None
    if heads is None:
        return tensor.clone()
    rows, columns = tensor.shape
    return tensor.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns).clone()


def tiny_untied(path: Path) -> Path:
    """The debug model with an output weight of its own."""
    shutil.copytree(TINY, path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return path
