"""A weight transfer engine that reads a directory of safetensors files, in the names of Hugging Face models."""

# pyright: reportMissingImports=false

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

MANIFEST = "published.json"
"""Written after all weights: {"version": int, "files": {name: bytes}}."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """There is nothing to agree on beforehand."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The directory, at the same path for every worker."""

    path: str


class SafetensorsDirectoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Replaces all weights of the model by those of a directory.

    A directory that is not whole changes nothing. A load that breaks off later leaves neither the old weights nor the
    new ones, and this process never serves again: the trainer starts another one.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _is_broken = False
    _has_loaded = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self._is_broken:
            raise RuntimeError("an earlier load of weights broke off half way; start this server again")
        self._has_loaded = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():  # there is none on a CPU, and then nothing to wait for
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """
        Raises:
            ValueError: the directory is not whole; nothing was read then.
        """
        paths = published_files(Path(update_info.path))
        self._is_broken = True
        initialize_layerwise_reload(self.model)
        self.model.load_weights(_tensors(paths))
        self._has_loaded = True

    def finish_weight_update(self) -> None:
        if not self._has_loaded:
            raise RuntimeError("no weights were loaded since start_weight_update")
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)
        self._is_broken = self._has_loaded = False

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        raise NotImplementedError("the trainer writes files; nothing is sent")


def published_files(directory: Path) -> list[Path]:
    """Returns the weight files of a published directory.

    Raises:
        ValueError: the manifest or a file is missing, or is shorter than it was when written.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except OSError as error:
        raise ValueError(f"{directory} holds no published weights: {error}") from error
    paths = []
    for name, size in sorted(manifest["files"].items()):
        path = directory / name
        found = path.stat().st_size if path.exists() else None
        if found != size:
            raise ValueError(f"{path} has {found} bytes here, and {size} where it was written")
        paths.append(path)
    return paths


def _tensors(paths: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def repack_tied_head(model: torch.nn.Module) -> None:
    """Gives an output projection that is tied to the embedding its new weight.

    The files hold a tied weight once, under the embedding's name, so nothing was loaded into the head; on a CPU it keeps
    a packed copy of its own, which would stay the old one.
    """
    heads: list[Any] = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    embeddings: list[Any] = [
        module
        for module in model.modules()
        if isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)
    ]
    for head in heads:
        tied = next((e for e in embeddings if e.weight.data_ptr() == head.weight.data_ptr()), None)
        if tied is not None:
            head.quant_method.process_weights_after_loading(head)
