"""The engine in this process: continuous batching over the training weights."""

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from trainer.errors import DataError, TrainingError
from trainer.models.base import CausalLM
from trainer.models.decode import PACK_BYTES, Decoding, open_decoding
from trainer.rl.sampling import draw, uniforms
from trainer.rl.types import Completion, Request, Sampling


class LocalEngine:
    """A `Generator` that reads the training weights where it can, and else a whole copy of them on this rank's device.

    `slots` completions are under way at once; the place of a finished one is taken by the next request. Completions of
    the same prompt read it once. What is drawn depends on each request's seed and on nothing else that is generated.
    Neither gradients, nor generators, nor the model's mode are touched.
    """

    overlaps = False  # it could, but then what generates what would depend on timing

    def __init__(self, model: CausalLM, *, slots: int, snapshot: bool = False, pack_bytes: int = PACK_BYTES):
        """
        Args:
            model: the model in training, plain or sharded.
            slots: completions under way at once.
            snapshot: serve the weights of the last `update` although training goes on. `update` may then be called while
                another thread is in `generate`: tokens from there on have the new version.
            pack_bytes: weights up to this size are copied even where they could be read in place: fused, they are faster.
        """
        self._model = model
        self._slots = slots
        self._decoding, self._refresh = open_decoding(model, snapshot=snapshot, pack_bytes=pack_bytes)
        self._version: int | None = None
        self._is_closed = False
        self._between_steps = threading.Lock()
        self._turn = threading.Lock()  # held by an update that waits, or generation would never let it in

    def update(self, version: int) -> None:
        """Serves the model's present weights from now on, as policy `version`. Collective over the ranks.

        To be called after every change of the weights: where they are read in place they are served at once, and only the
        number is missing.
        """
        with self._turn, self._between_steps:
            self._refresh()
            self._version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        """Returns one completion for each request, in their order; this rank's own, without any collective.

        A completion is cut ("length") at `max_new_tokens`, or earlier where the model's context ends.

        Raises:
            DataError: a prompt is empty, fills the context, or has an id that the model does not know.
            TrainingError: no weights were served yet, or their logits are not finite.
        """
        for number, request in enumerate(requests):
            self._check(number, request)
        if self._version is None:
            raise TrainingError("the engine serves no weights yet: call update(version) before generate")
        with self._between_steps:  # it fills the cache, which `close` frees
            self._check_open()
            batch = _Batch(self._decoding, requests, sampling, self._slots, self._model)
        while batch.active:
            with self._turn:
                pass
            with self._between_steps:
                self._check_open()
                batch.step(self._version)
        return batch.completions()

    def close(self) -> None:
        """Frees the cache, and ends a `generate` that is under way in another thread."""
        with self._turn, self._between_steps:
            self._is_closed = True
            self._decoding.forget()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TrainingError("the engine was closed while it generated")

    def _check(self, number: int, request: Request) -> None:
        ids, limit, vocab_size = request.prompt_ids, self._decoding.context_tokens, self._model.vocab_size
        if not len(ids):
            raise DataError(f"request {number} has an empty prompt; a completion needs at least one token before it")
        if limit is not None and len(ids) >= limit:
            raise DataError(
                f"request {number}: the prompt has {len(ids)} tokens, and the model's context ends at {limit}; nothing can "
                "follow it. Shorten the prompts, or raise max_position_embeddings in the model's config.json"
            )
        if min(ids) < 0 or max(ids) >= vocab_size:
            wrong = next(token for token in ids if not 0 <= token < vocab_size)
            raise DataError(
                f"request {number}: token id {wrong} is not in the model's vocabulary of {vocab_size}; is the tokenizer "
                "another model's?"
            )


class _Batch:
    """One call of `generate`: which request is where, and what was drawn.

    Slots [0, active) are under way. `_prompt_in` says which prompt a slot's cache begins with, also after its completion
    is finished: the next sample of that prompt takes it over.
    """

    def __init__(
        self, decoding: Decoding, requests: Sequence[Request], sampling: Sampling, slots: int, model: CausalLM
    ):
        self._decoding, self._requests, self._sampling = decoding, requests, sampling
        self._device = model.embedding.weight.device
        self._prompts = [tuple(request.prompt_ids) for request in requests]
        context = decoding.context_tokens
        limits = [request.max_new_tokens for request in requests]
        if context is not None:
            limits = [min(limit, context - len(p)) for limit, p in zip(limits, self._prompts, strict=True)]
        self._limits = np.array(limits, np.int64)
        self._waiting = deque(i for i, limit in enumerate(limits) if limit > 0)
        slots, longest = min(slots, len(self._waiting)), max(limits, default=0)
        self._is_stop = np.zeros(model.vocab_size, bool)
        self._is_stop[[i for i in sampling.stop_ids if 0 <= i < model.vocab_size]] = True

        self._request = np.zeros(slots, np.int64)
        self._token = np.zeros(slots, np.int64)
        self._position = np.zeros(slots, np.int64)
        self._prompt_in: list[tuple[int, ...] | None] = [None] * slots
        self._uniforms = np.zeros((slots, longest))
        self._produced = np.zeros(len(requests), np.int64)
        self._ids = np.zeros((len(requests), longest), np.int64)
        self._logprobs = np.zeros((len(requests), longest), np.float32)
        self._versions = np.zeros((len(requests), longest), np.int64)
        self.active = 0
        if slots:
            needed = [len(p) + limit for p, limit in zip(self._prompts, limits, strict=True) if limit > 0]
            decoding.begin(slots, max(needed))
            self._admit(list(range(slots)))

    def step(self, version: int) -> None:
        """Draws one token for every slot that is under way, and fills those that finish with it."""
        active = self.active
        request, position = self._request[:active], self._position[:active]
        produced = self._produced[request]
        logits = self._decoding.step(self._token[:active], position)
        uniform = torch.from_numpy(self._uniforms[np.arange(active), produced]).to(self._device)
        with torch.inference_mode():
            ids, logprobs = (drawn.cpu().numpy() for drawn in draw(logits, self._sampling, uniform))
        if not np.isfinite(logprobs).all():
            self._decoding.forget()
            raise TrainingError(f"the logits of policy {version} are not finite, so no token can be drawn from them")
        self._ids[request, produced] = ids
        self._logprobs[request, produced] = logprobs
        self._versions[request, produced] = version
        self._token[:active] = ids
        position += 1
        produced += 1
        self._produced[request] = produced
        finished = self._is_stop[ids] | (produced >= self._limits[request])
        if finished.any():
            self._refill(np.flatnonzero(finished).tolist())

    def completions(self) -> list[Completion]:
        return [self._completion(number, int(count)) for number, count in enumerate(self._produced)]

    def _completion(self, number: int, count: int) -> Completion:
        ids = self._ids[number, :count].tolist()
        return Completion(
            ids=ids,
            logprobs=self._logprobs[number, :count].tolist(),
            versions=self._versions[number, :count].tolist(),
            finish_reason="stop" if ids and self._is_stop[ids[-1]] else "length",
        )

    def _refill(self, free: list[int]) -> None:
        """Puts waiting requests into the free slots; if there are too few, the last slots move down into the gaps."""
        count = min(len(free), len(self._waiting))
        self._admit(free[:count])
        for slot in reversed(free[count:]):
            self.active -= 1
            if slot != self.active:
                self._move(self.active, slot)

    def _move(self, source: int, target: int) -> None:
        self._decoding.copy(source, target, int(self._position[source]))
        for values in (self._request, self._token, self._position, self._uniforms):
            values[target] = values[source]
        self._prompt_in[target] = self._prompt_in[source]

    def _admit(self, slots: list[int]) -> None:
        """Starts the next requests. All of a prompt but its last token is read ahead; that one is the first step's."""
        unread: dict[tuple[int, ...], list[int]] = {}
        for slot in slots:
            number = self._waiting.popleft()
            prompt = self._prompts[number]
            self._request[slot] = number
            self._token[slot], self._position[slot] = prompt[-1], len(prompt) - 1
            limit = self._limits[number]
            self._uniforms[slot, :limit] = uniforms(self._requests[number].seed, limit)
            self.active = max(self.active, slot + 1)
            if len(prompt) == 1 or self._prompt_in[slot] == prompt:
                continue
            if prompt not in unread and prompt in self._prompt_in:
                self._decoding.copy(self._prompt_in.index(prompt), slot, len(prompt) - 1)
                self._prompt_in[slot] = prompt
            else:
                unread.setdefault(prompt, []).append(slot)
                self._prompt_in[slot] = None
        if unread:
            self._decoding.prefill([p[:-1] for p in unread], [places[0] for places in unread.values()])
        for prompt, places in unread.items():
            for slot in places:
                self._prompt_in[slot] = prompt
            for slot in places[1:]:
                self._decoding.copy(places[0], slot, len(prompt) - 1)
