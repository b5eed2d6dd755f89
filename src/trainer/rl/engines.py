"""Which engine generates."""

from trainer.config.run import RLConfig
from trainer.errors import ConfigError
from trainer.models.base import CausalLM
from trainer.rl.rollout import LocalEngine
from trainer.rl.types import Generator
from trainer.train.supply import Place


def build_engine(config: RLConfig, model: CausalLM, place: Place[RLConfig]) -> Generator:
    """Returns the engine that the config names; it serves nothing before its first `update`. Collective.

    Raises:
        ConfigError: there is no such engine here.
    """
    del place
    if config.engine.type == "local":
        return LocalEngine(model, slots=config.engine.slots, snapshot=config.rl.max_lag > 0)
    raise ConfigError(f'engine.type = "{config.engine.type}" is not available')
