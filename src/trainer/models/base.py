"""What training asks of a model, whoever wrote its layers."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

Head = Callable[[Tensor, Tensor], Tensor]
"""head(hidden [rows, T, d], weight [vocab, d], both in the compute dtype): what a forward ends with."""


class CausalLM(nn.Module, ABC):
    """A causal language model over packed rows. Parameters are named as in transformers.

    Attributes:
        compute_dtype: dtype of activations, and of the weights when they are used.
        tied: the output weight is the embedding's parameter.
        vocab_size: rows of the embedding and of the output weight.
        rows_added: how many of them the config.json does not have (new tokens).
        random_forward: forward may draw random numbers (dropout), so recomputing it must replay them.
    """

    compute_dtype: torch.dtype
    tied: bool
    vocab_size: int
    rows_added: int
    random_forward: bool

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        head: Head | None = None,
    ) -> Tensor:
        """Returns logits [rows, T, vocab] in the compute dtype, or what `head` returns.

        Args:
            input_ids: [rows, T] int64.
            position_ids: [rows, T] int64, restarting with each document; by default 0..T-1.
            document_ids: [rows, T] integer, ascending within a row, -1 = padding behind the last document; by default
                each row is one document.
            head: called as head(hidden, output weight) inside forward, where sharded weights are whole.
        """

    @property
    @abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The units that are sharded, recomputed and compiled one by one."""

    @property
    @abstractmethod
    def embedding(self) -> nn.Embedding:
        """The input embedding: owner of `weight` [vocab, d]."""

    @property
    @abstractmethod
    def output(self) -> nn.Linear:
        """The output projection: owner of `weight` [vocab, d]."""

    @property
    def context_tokens(self) -> int | None:
        """Longest text in tokens that the config allows; None where it does not say."""
        return None

    @property
    def learned_positions(self) -> bool:
        """Whether positions beyond `context_tokens` do not exist at all; otherwise the model has only never seen them."""
        return False

    @abstractmethod
    def reset_buffers(self) -> None:
        """Fills the buffers that no checkpoint holds (after `to_empty`, which leaves them undefined)."""

    @abstractmethod
    def initializer(self, seed: int) -> Callable[[str], Tensor]:
        """Returns a function from a parameter's name to its random initial value: whole, float32, on CPU.

        The value depends on the seed and the name alone, so every world size starts from the same weights.
        """

    def converted_weights(self, model_dir: Path) -> dict[str, Tensor] | None:
        """Returns the directory's weights under this model's names, where the files use other ones; None if the files
        must use the same names.

        Raises:
            ModelError: they do not fit.
        """
        return None

    def tie_weights(self) -> None:
        """Makes the output weight the embedding's parameter where the config ties them."""
        if self.tied:
            self.output.weight = self.embedding.weight
