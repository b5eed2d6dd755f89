"""Rollouts from vLLM servers, as the rest of the trainer sees them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.config.rl import EngineConfig
from trainer.core.distributed import World, agree, on_main
from trainer.core.log import logger
from trainer.errors import ConfigError, DataError, LaunchError, TrainingError
from trainer.models.base import CausalLM
from trainer.models.files import resolve_model_dir
from trainer.models.hf import export_config
from trainer.rl.types import Completion, Request, Sampling
from trainer.rl.vllm.client import Answer, ServerClient, ServerError
from trainer.rl.vllm.keeper import Keeper, Replica
from trainer.rl.vllm.pool import Pool
from trainer.rl.vllm.probe import BOUNDS, NEW_TOKENS, Probe, difference, mismatch, model_logprobs, probe_prompts
from trainer.rl.vllm.publish import Publication, WeightsFolder, folder_for
from trainer.rl.vllm.server import HOST, LaunchedServer, server_command, server_environment

TrainerLogprobs = Callable[[list[int]], list[float]]
"""Log-probability of each token but the first under the model that trains, at the training's temperature. Collective."""


class VLLMEngine:
    """A `Generator` over one or several servers. Constructed, updated and closed on all ranks together.

    Rank 0 starts the servers or finds them, writes weights and has them loaded; every rank sends its own requests. A
    server that fails is started again (if it was launched) and gets the present weights again; requests go elsewhere or
    wait meanwhile.

    Args:
        model: the one that trains; its weights are published in its compute dtype.
        config: of the engine.
        run_dir: of the run: logs/vllm.log, and weights-served/ by default.
        source: `model.name`, whose config.json the server gets.
        sampling: the training's; says which log-probabilities a server must return.
        seq_len: tokens of prompt and completion together, at most.
        trainer_logprobs: in place of the model's own forward at the parity probe.

    Raises:
        ConfigError: the sampling is one whose log-probabilities no server can return.
        LaunchError: a server does not start, or is not there.
    """

    overlaps = True

    def __init__(
        self,
        model: CausalLM,
        config: EngineConfig,
        *,
        run_dir: Path,
        world: World,
        source: str | Path,
        sampling: Sampling,
        seq_len: int,
        trainer_logprobs: TrainerLogprobs | None = None,
    ):
        check_sampling(sampling, sampling)
        self._model, self._config, self._sampling, self._world = model, config, sampling, world
        self._folder = WeightsFolder(folder_for(run_dir, config.weights_dir))
        self._trainer_logprobs = trainer_logprobs
        self._version: int | None = None
        self.publication: Publication | None = None
        """What the last update wrote."""
        self._keeper: Keeper | None = None
        urls = [f"http://{HOST}:{config.port}"] if config.launch else list(config.urls)
        clients = [ServerClient(url, config.request_seconds) for url in urls]
        self._pool = Pool(
            clients, at_once=config.slots, patience_seconds=config.start_seconds, first=world.rank % len(clients)
        )
        source = resolve_model_dir(str(source))
        self._max_tokens = min(seq_len, _context_tokens(source) or seq_len)
        self._token = on_main(self._start, run_dir, source, clients)

    # -- the Generator -----------------------------------------------------------------------------------------------

    def update(self, version: int) -> None:
        """Serves the model's present weights from now on, as policy `version`. Collective over the ranks.

        Raises:
            TrainingError: the weights cannot be written, no server takes them, or one then serves another model.
        """
        if version == self._version:
            return
        self.publication = self._folder.publish(self._model, version, self._model.compute_dtype)
        on_main(self._serve, version)
        self._version = version
        self._prove()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Returns one completion for each request, in their order; this rank's own, without any collective.

        Raises:
            TrainingError: no weights are served yet, or a request got no answer from any server.
            DataError: a prompt leaves no room for a completion.
        """
        if self._version is None:
            raise TrainingError("the engine serves no weights yet: call update(version) before generate")
        check_sampling(sampling, self._sampling)
        for number, request in enumerate(requests):
            self._check(number, request)
        return self._pool.map(lambda server, request: self._complete(server, request, sampling), requests)

    def close(self) -> None:
        """Stops the servers that were launched and removes the published weights."""
        self._pool.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._world.is_main:
            self._folder.close()

    # -- rank 0 ------------------------------------------------------------------------------------------------------

    def _start(self, run_dir: Path, source: Path, clients: Sequence[ServerClient]) -> str:
        """Starts the servers, or finds them, and returns the token of this run's labels."""
        self._folder.clear()
        replicas = [Replica(client) for client in clients]
        if self._config.launch:
            replicas[0].process = self._launched(run_dir, source)
        keeper = Keeper(
            replicas,
            self._folder,
            keep_cache=self._config.keep_cache,
            start_seconds=self._config.start_seconds,
        )
        try:
            keeper.start()
        except BaseException:
            keeper.close()
            raise
        self._keeper = keeper
        return keeper.token

    def _launched(self, run_dir: Path, source: Path) -> LaunchedServer:
        if self._world.local_size != self._world.size:
            raise LaunchError(
                "engine.launch starts a server that only this host can reach, but the run has other hosts; start servers "
                "yourself and name them in engine.urls (docs/rl.md says how)"
            )
        model_dir = self._folder.root / "model"
        model_dir.mkdir()
        (model_dir / "config.json").write_text(json.dumps(export_config(self._model, source), indent=2) + "\n")
        on_cpu = self._model.embedding.weight.device.type == "cpu"
        command = server_command(
            self._config,
            model_dir.absolute(),
            dtype=str(self._model.compute_dtype).removeprefix("torch."),
            max_model_tokens=self._max_tokens,
            logprobs_mode=logprobs_mode(self._sampling),
            on_cpu=on_cpu,
        )
        log = run_dir / "logs" / "vllm.log"
        return LaunchedServer(command, server_environment(self._config, on_cpu=on_cpu), log, self._config.port)

    def _serve(self, version: int) -> None:
        assert self._keeper is not None
        self._keeper.serve(version)

    # -- parity ------------------------------------------------------------------------------------------------------

    def _prove(self) -> None:
        """Holds each server's log-probabilities against the trainer's, after its first load and after its second.

        The first shows that the server computes the same function; the second that replacing weights replaces all of
        them.
        """
        probes = on_main(self._probes)
        if not probes:
            return
        temperature, bound = self._sampling.temperature, BOUNDS[self._model.compute_dtype]
        worst: dict[str, float] = {}
        for probe in probes:
            found = difference(probe, self._own_logprobs(probe, temperature))
            worst[probe.url] = max(worst.get(probe.url, 0.0), found)
        worst = agree(worst)
        for url, found in worst.items():
            if not found <= bound:
                raise self._mismatch(url, found, bound, [probe for probe in probes if probe.url == url])
            logger.info(f"{url} serves step {self._version}: log-probabilities within {found:.2g} of the trainer's")

    def _own_logprobs(self, probe: Probe, temperature: float) -> list[float]:
        ids = [*probe.prompt_ids, *probe.ids]
        if self._trainer_logprobs is not None:
            return self._trainer_logprobs(ids)
        return model_logprobs(self._model, ids, temperature)

    def _mismatch(self, url: str, found: float, bound: float, probes: Sequence[Probe]) -> TrainingError:
        assert self._version is not None
        at_one = None
        if self._sampling.temperature not in (0.0, 1.0) and self._trainer_logprobs is None:
            at_one = agree(max(difference(probe, self._own_logprobs(probe, 1.0)) for probe in probes))
        dtype = self._model.compute_dtype
        return mismatch(url, self._version, found, bound, dtype, tied=self._model.tied, at_one=at_one)

    def _probes(self) -> list[Probe]:
        assert self._keeper is not None
        found = []
        prompts = probe_prompts(self._model.vocab_size, self._max_tokens)
        for replica in self._keeper.current():
            if replica.proven >= min(replica.loads, 2):
                continue
            requests = [Request(ids, NEW_TOKENS, seed) for seed, ids in enumerate(prompts)]
            pool = Pool([replica.client], at_once=1, patience_seconds=self._config.start_seconds)
            answers = pool.map(lambda server, request: self._complete(server, request, self._sampling), requests)
            replica.proven = replica.loads
            found += [
                Probe(replica.client.url, list(request.prompt_ids), answer.ids, answer.logprobs)
                for request, answer in zip(requests, answers, strict=True)
            ]
        return found

    # -- one request -------------------------------------------------------------------------------------------------

    def _complete(self, server: ServerClient, request: Request, sampling: Sampling) -> Completion:
        oldest = self._version
        assert oldest is not None
        answer = server.generate(
            request.prompt_ids,
            min(request.max_new_tokens, self._max_tokens - len(request.prompt_ids)),
            request.seed,
            sampling,
            salt=f"{self._token}:{oldest}" if self._config.keep_cache else None,
        )
        if answer.finish_reason not in ("stop", "length"):
            raise ServerError(server.url, f"a completion ended with {answer.finish_reason!r}", status=503)
        versions = self._versions(server, answer)
        if min(versions, default=oldest) < oldest:
            raise ServerError(server.url, f"serves step {min(versions)} yet, and step {oldest} is due", status=503)
        stopped = bool(answer.ids) and answer.ids[-1] in sampling.stop_ids
        return Completion(answer.ids, answer.logprobs, versions, "stop" if stopped else "length")

    def _versions(self, server: ServerClient, answer: Answer) -> list[int]:
        """Returns the policy version of each token."""
        versions: list[int] = []
        for span in sorted(answer.spans, key=lambda span: span.start):
            token, _, version = span.label.partition(":")
            if token != self._token:
                raise ServerError(server.url, f"serves {span.label!r}, which are not this run's weights", status=503)
            if span.start != len(versions):
                break
            versions += [int(version)] * (span.end - span.start)
        if len(versions) != len(answer.ids):
            raise ServerError(
                server.url,
                f"does not say which weights produced its {len(answer.ids)} tokens (weight_versions: {answer.spans}); "
                "vLLM >= 0.32 does",
                status=400 if answer.spans else 503,
            )
        return versions

    def _check(self, number: int, request: Request) -> None:
        if not len(request.prompt_ids):
            raise DataError(f"request {number} has an empty prompt; a completion needs at least one token before it")
        if len(request.prompt_ids) >= self._max_tokens:
            raise DataError(
                f"request {number}: the prompt has {len(request.prompt_ids)} tokens, and the server's context ends at "
                f"{self._max_tokens}; nothing can follow it. Shorten the prompts, or raise data.seq_len"
            )


def logprobs_mode(sampling: Sampling) -> str:
    """Returns vLLM's --logprobs-mode for this sampling.

    "processed_logprobs" are those of the distribution that is drawn from, so at its temperature, but also renormalised
    to what top_p and top_k leave; "raw_logprobs" are those of the whole vocabulary at temperature 1.
    """
    return "raw_logprobs" if _truncates(sampling) else "processed_logprobs"


def check_sampling(sampling: Sampling, training: Sampling) -> None:
    """
    Raises:
        ConfigError: a server that is started for `training` has no log-probabilities over the whole vocabulary at the
            temperature of `sampling`.
    """
    if (_truncates(sampling) or _truncates(training)) and sampling.temperature not in (0.0, 1.0):
        raise ConfigError(
            f"vLLM cannot return log-probabilities at temperature {sampling.temperature:g} together with top_p or top_k: set "
            'rl.temperature (and val.temperature) to 1, or rl.top_p = 1 and rl.top_k = 0, or engine.type = "local"'
        )
    if _truncates(sampling) and not _truncates(training):
        raise ConfigError("the engine's server was started for sampling without top_p and top_k")


def _truncates(sampling: Sampling) -> bool:
    return sampling.top_p < 1.0 or sampling.top_k > 0


def _context_tokens(source: Path) -> int | None:
    found = json.loads((source / "config.json").read_text(encoding="utf-8")).get("max_position_embeddings")
    return found if isinstance(found, int) else None
