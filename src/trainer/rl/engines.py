"""Which engine generates."""

from trainer.config.run import RLConfig
from trainer.models.base import CausalLM
from trainer.rl.rollout import LocalEngine
from trainer.rl.types import Generator, Sampling
from trainer.train.supply import Place


def build_engine(config: RLConfig, model: CausalLM, place: Place[RLConfig]) -> Generator:
    """Returns the engine that the config names; it serves nothing before its first `update`. Collective.

    Raises:
        ConfigError: a server cannot return the log-probabilities that the sampling needs.
        LaunchError: a server does not start, or is not there.
    """
    if config.engine.type == "local":
        return LocalEngine(model, slots=config.engine.slots, snapshot=config.rl.max_lag > 0)
    from trainer.rl.vllm.engine import VLLMEngine  # HTTP clients and processes, of no use to the engine above

    r = config.rl
    return VLLMEngine(
        model,
        config.engine,
        run_dir=place.run_dir,
        world=place.world,
        source=config.model.name,
        sampling=Sampling(r.temperature, r.top_p, r.top_k),
        seq_len=config.data.seq_len,
    )
