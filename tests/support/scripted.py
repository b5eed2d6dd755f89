"""A rollout engine that says what a test tells it to."""

from collections.abc import Callable, Sequence

from trainer.rl.types import Completion, Request, Sampling


class ScriptedGenerator:
    """Answers every request with the ids that `script(request)` returns, cut like a real engine would.

    Log-probabilities are -(place + 1) / 8 and so tell tokens apart; the version is what `update` was last given.
    """

    def __init__(self, script: Callable[[Request], Sequence[int]]):
        self.script = script
        self.version = 0
        self.calls: list[list[Request]] = []

    def update(self, version: int) -> None:
        self.version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.calls.append([*requests])
        return [self._complete(request, sampling) for request in requests]

    def close(self) -> None:
        pass

    def _complete(self, request: Request, sampling: Sampling) -> Completion:
        ids = [*self.script(request)][: request.max_new_tokens]
        return Completion(
            ids=ids,
            logprobs=[-(place + 1) / 8 for place in range(len(ids))],
            versions=[self.version] * len(ids),
            finish_reason="stop" if ids[-1] in sampling.stop_ids else "length",
        )


class SilentGenerator:
    """Serves a version, and generates nothing."""

    def __init__(self, *, overlaps: bool):
        self.overlaps, self.version = overlaps, -1

    def update(self, version: int) -> None:
        self.version = version

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        raise NotImplementedError

    def close(self) -> None:
        pass
