"""Supervised fine-tuning's side of a run: documents, the cross-entropy, the loss on held-out documents."""

from collections.abc import Callable

from trainer.config.rules import check_steps
from trainer.config.run import SFTConfig
from trainer.core import device as devices
from trainer.core.distributed import World
from trainer.core.log import logger
from trainer.data.batch import GlobalBatch, row_width
from trainer.data.build import TrainData, build_data
from trainer.data.loader import BatchLoader
from trainer.data.validation import validation_batches
from trainer.errors import ConfigError, DataError
from trainer.models.base import CausalLM
from trainer.train.boundary import Boundaries
from trainer.train.run import Run
from trainer.train.step import LossFunction, evaluate
from trainer.train.supply import Place, Recipe, Supply


class SFTSupply(Supply):
    """Batches of documents.

    Raises:
        DataError: the documents cannot be read, or there is none to train or validate on.
        ConfigError: the schedule does not fit into the steps that `epochs` comes to; from `attach`, the model has no
            embedding for a synthetic token or for a position.
    """

    keeps_cycles = True

    def __init__(self, place: Place[SFTConfig], loss_function: LossFunction):
        config, world = place.config, place.world
        data = build_data(config.data, tokenizer=place.tokenizer, seed=config.seed, world=world)
        self.loss_function = loss_function
        self.batches: BatchLoader = BatchLoader(
            data.train,
            config.data,
            seed=config.seed,
            rank=world.rank,
            world_size=world.size,
            allow=place.allow,
            pin_memory=devices.pins_memory(place.device),
        )
        self.max_steps = _max_steps(config, self.batches)
        self._config, self._world = config, world
        self._longest_tokens = max(int(part.lengths.max()) for part in (data.train, data.val) if part is not None)
        self._held_out = _validation(config, data, world)

    def boundaries(self) -> Boundaries:
        config = self._config.data
        rows, batch_size = self._world.size * config.micro_batch_size, config.batch_size

        def micro_steps_in(epoch: int) -> int:
            batches, rest = divmod(self.batches.rows_in_epoch(epoch), batch_size)
            return batches * -(-batch_size // rows) + -(-rest // rows)

        return Boundaries(-(-batch_size // rows), config.epoch_end, micro_steps_in)

    def attach(self, run: Run) -> None:
        fake = self._config.data.fake
        if fake is not None and fake.vocab_size > run.model.vocab_size:
            raise ConfigError(
                f"data.fake.vocab_size = {fake.vocab_size}, but {self._config.model.name} has a vocabulary of "
                f"{run.model.vocab_size}: synthetic tokens beyond it have no embedding; lower data.fake.vocab_size"
            )
        self._check_positions(run.model)

    def _check_positions(self, model: CausalLM) -> None:
        """Holds the lengths of documents, and of the rows that are filled up with padding, against the model's positions."""
        context, config = model.context_tokens, self._config.data
        if context is None:
            return
        padded_tokens = config.seq_len if config.pack else row_width(self._longest_tokens, config.seq_len)
        has = f"but {self._config.model.name} has {context} positions (max_position_embeddings)"
        if model.learned_positions and padded_tokens > context:
            raise ConfigError(
                f"rows have {padded_tokens} tokens, {has}, and none beyond; set data.seq_len = {context} or lower"
            )
        if self._longest_tokens > context:
            logger.warning(
                f"the longest document has {self._longest_tokens} tokens, {has}: it has never seen those beyond. Lower "
                "data.seq_len, or give its config.json a rope scaling"
            )

    def measure(self, run: Run, pause: Callable[[], bool]) -> dict[str, float] | None:
        measured = evaluate(run.model, run.loss_function, self._held_out, device=run.device, pause=pause)
        return None if measured is None else dict(zip(("val_loss", "val_tokens"), measured, strict=True))


def supply(loss_function: LossFunction) -> Recipe:
    """Returns the recipe of supervised fine-tuning with this loss."""
    return lambda place: SFTSupply(place, loss_function)


def _max_steps(config: SFTConfig, loader: BatchLoader) -> int:
    if config.max_steps is not None:
        return config.max_steps
    assert config.epochs is not None  # a config has one of the two
    max_steps = loader.batches_in_epochs(config.epochs)
    check_steps(config, max_steps)
    return max_steps


def _validation(config: SFTConfig, data: TrainData, world: World) -> list[GlobalBatch]:
    if not config.val.interval:
        return []
    if data.val is None:
        raise DataError("val.interval is set, but no document is held out: set data.val_sources or data.val_documents")
    batches = validation_batches(data.val, config.data, config.val, rank=world.rank, world_size=world.size)
    return list(batches)
