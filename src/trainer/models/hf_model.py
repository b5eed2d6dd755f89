"""`model.impl = "hf"`: any causal language model of transformers, trained the way the native decoder is."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.core.device import is_out_of_memory
from trainer.core.rng import derive_seed
from trainer.errors import ModelError
from trainer.models.base import CausalLM, Head


class HFModel(CausalLM):
    """Wraps `AutoModelForCausalLM`: the same modules under the same names, with this package's forward.

    Documents are kept apart by transformers itself, which takes a position that does not follow its predecessor for a
    document's start; a model that takes no positions cannot train on packed rows.
    """

    _inner: Any

    def __init__(self, model_dir: Path, compute_dtype: torch.dtype, vocab_size: int = 0):
        super().__init__()
        self.compute_dtype = compute_dtype
        self.model_dir = model_dir
        config = _load_config(model_dir)
        self.rows_added = max(0, vocab_size - config.vocab_size)
        config.vocab_size += self.rows_added
        config.use_cache = False
        self.vocab_size: int = config.vocab_size
        self.tied = bool(config.tie_word_embeddings)
        self.random_forward = True
        with torch.device("meta"):
            inner = _from_config(config, model_dir)
        # Registered by name below, not as one child: parameter names are those of the files.
        object.__setattr__(self, "_inner", inner)
        for name, module in inner.named_children():
            self.add_module(name, module)
        base = inner.base_model
        if inner.get_output_embeddings() is None or base is inner:
            raise ModelError(f"{model_dir}: {type(inner).__name__} has no output projection over a base model to train")
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters
        self._logits_checked = False

    @property
    def blocks(self) -> list[nn.Module]:
        kinds = set(self._inner._no_split_modules or ())
        blocks = [module for module in self._inner.modules() if type(module).__name__ in kinds]
        inner = {id(child) for block in blocks for child in block.modules() if child is not block}
        return [block for block in blocks if id(block) not in inner]

    @property
    def context_tokens(self) -> int | None:
        limit = getattr(self._inner.config, "max_position_embeddings", None)
        return limit if isinstance(limit, int) and limit > 0 else None

    @property
    def learned_positions(self) -> bool:
        """GPT-2's table of positions has one row for each; OPT's has two more, in front."""
        tables = (m for m in self.modules() if isinstance(m, nn.Embedding) and m is not self.embedding)
        return any(0 <= table.num_embeddings - (self.context_tokens or 0) <= 2 for table in tables)

    @property
    def embedding(self) -> nn.Embedding:
        return self._inner.get_input_embeddings()

    @property
    def output(self) -> nn.Linear:
        return self._inner.get_output_embeddings()

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        head: Head | None = None,
    ) -> Tensor:
        arguments: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if self._takes_positions:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            arguments["position_ids"] = position_ids
        elif document_ids is not None and bool((document_ids > document_ids[:, :1]).any()):
            raise ModelError(
                f"{type(self._inner).__name__} takes no position_ids, so documents in one row would see each other; "
                "set data.pack = false"
            )
        if not self._logits_checked:
            # Not on the batch's own tokens: a row of padding can have an embedding of zeros, which nothing enlarges.
            ids = torch.tensor([[self.vocab_size // 2, self.vocab_size // 3]], device=input_ids.device)
            positions = {"position_ids": torch.arange(2, device=ids.device)[None]} if self._takes_positions else {}
            self._check_logits({"input_ids": ids, "use_cache": False} | positions)
        hidden = self._inner.base_model(**arguments)[0]
        weight = self.output.weight.to(hidden.dtype)
        return F.linear(hidden, weight) if head is None else head(hidden, weight)

    @torch.no_grad()
    def _check_logits(self, arguments: dict[str, Any]) -> None:
        """Refuses, on two tokens, a model whose logits are not `hidden @ weight`: biased, scaled or capped ones."""
        seen: list[Tensor] = []

        def enlarge(module: nn.Module, args: Any, output: Any) -> None:
            seen.append(output[0].mul_(1000 / output[0].abs().max()))  # so large that any cap shows

        training = self.training
        self.eval()
        hook = self._inner.base_model.register_forward_hook(enlarge)
        try:
            expected = type(self._inner).forward(self._inner, **arguments)["logits"]
        finally:
            hook.remove()
            self.train(training)
        logits = F.linear(seen[0], self.output.weight.to(seen[0].dtype))
        close = torch.allclose(logits, expected.to(logits.dtype), rtol=1e-2, atol=1e-2 * logits.abs().max().item())
        if not close or getattr(self.output, "bias", None) is not None:
            raise ModelError(
                f"{type(self._inner).__name__} does more to its logits than hidden @ weight.T (a bias, scale or cap), "
                "which the chunked loss does not do; this architecture is not supported"
            )
        self._logits_checked = True

    def reset_buffers(self) -> None:
        """transformers' own initialisation knows rotary frequencies; for what is left, a whole model is built once."""
        buffers = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        for buffer in buffers.values():
            buffer.fill_(float("nan"))
        with torch.no_grad():
            for module in self.modules():
                if any(True for _ in module.buffers(recurse=False)) and not any(
                    True for _ in module.parameters(recurse=False)
                ):
                    self._inner._init_weights(module)
        others = [name for name, buffer in self.named_buffers() if name not in buffers or buffer.isnan().any()]
        if others:
            whole = dict(self._whole_model(seed=0).named_buffers())
            for name in others:
                self.get_buffer(name).copy_(whole[name])

    def initializer(self, seed: int) -> Callable[[str], Tensor]:
        """transformers' own initialisation. It fills a model in one go, so a whole one is built on CPU."""
        whole = self._whole_model(seed)
        tensors = dict(whole.named_parameters()) | dict(whole.named_buffers())
        return lambda name: tensors[name].detach()

    def _whole_model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(seed, "init"))
            return _from_config(self._inner.config, self.model_dir)

    def converted_weights(self, model_dir: Path) -> dict[str, Tensor] | None:
        """Lets transformers rename what is in the files (older layouts, fused experts); needs the whole model in memory."""
        from transformers import AutoModelForCausalLM

        load: Any = AutoModelForCausalLM.from_pretrained
        try:
            model, info = load(model_dir, dtype=torch.float32, output_loading_info=True, local_files_only=True)
        except Exception as error:  # it raises many kinds; each means the same to the user
            if is_out_of_memory(error):
                raise
            raise ModelError(f"transformers cannot load the weights in {model_dir}: {error}") from error
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if info.get(kind):
                raise ModelError(f"the weights in {model_dir}: {kind.replace('_', ' ')}: {sorted(info[kind])[:10]}")
        return dict(model.named_parameters()) | {
            name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()
        }


def transformers_on_meta(model_dir: Path) -> nn.Module:
    """Returns transformers' own causal LM of a config.json without storage: its names, order, shapes and layer types.

    Raises:
        ModelError: transformers cannot build it.
    """
    config = _load_config(model_dir)
    with torch.device("meta"):
        return _from_config(config, model_dir)


def _from_config(config: Any, model_dir: Path) -> Any:
    """Returns transformers' model for the config, with SDPA where the architecture has it, else eager attention.

    Raises:
        ModelError: the architecture is no causal LM, or a number in the config makes no sense to it.
    """
    import transformers

    problem: Exception | None = None
    for attention in ("sdpa", "eager"):
        try:
            return transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=attention
            )
        except Exception as error:  # a wrong number surfaces as whatever its architecture's code does with it
            if is_out_of_memory(error):
                raise
            problem = error
    raise ModelError(
        f"transformers cannot build a causal LM from {model_dir}/config.json: {type(problem).__name__}: {problem}"
    ) from problem


def _load_config(model_dir: Path) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(model_dir, local_files_only=True)
    except Exception as error:  # it validates types with an Exception of its own
        raise ModelError(f"transformers cannot read {model_dir}/config.json: {error}") from error


def cast_at_use(model: CausalLM) -> None:
    """Makes a single process compute as FSDP's mixed precision does: float32 weights, cast where they are used.

    The native decoder's layers do that by themselves. For others, each block sees cast weights while its forward runs
    (also when it is recomputed), and so does the rest of the model.
    """
    if not isinstance(model, HFModel) or model.compute_dtype == torch.float32:
        return
    owned = {id(module) for block in model.blocks for module in block.modules()}
    rest = [module for module in model.modules() if id(module) not in owned]
    for owner, modules in [*((block, list(block.modules())) for block in model.blocks), (model, rest)]:
        owner.forward = _with_cast_weights(owner.forward, modules, model.compute_dtype)


def _with_cast_weights(forward: Callable[..., Any], modules: list[nn.Module], dtype: torch.dtype) -> Callable[..., Any]:
    def casting_forward(*args: Any, **kwargs: Any) -> Any:
        with _cast_weights(modules, dtype):
            return forward(*args, **kwargs)

    return casting_forward


@contextmanager
def _cast_weights(modules: list[nn.Module], dtype: torch.dtype) -> Iterator[None]:
    cast: dict[int, Tensor] = {}  # a tied weight is cast once
    originals: list[tuple[dict[str, Any], str, nn.Parameter]] = []
    try:
        for module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    originals.append((module._parameters, name, parameter))
        for owner, name, parameter in originals:
            if id(parameter) not in cast:
                cast[id(parameter)] = parameter.to(dtype)
            owner[name] = cast[id(parameter)]  # a plain tensor: gradients flow through the cast into the parameter
        yield
    finally:
        for owner, name, parameter in originals:
            owner[name] = parameter
