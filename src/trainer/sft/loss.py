"""The loss of supervised fine-tuning."""

from trainer.train.cross_entropy import cross_entropy

__all__ = ["cross_entropy"]
