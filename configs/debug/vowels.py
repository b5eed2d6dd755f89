"""An environment in one file, easy enough that a model with random weights gets different rewards."""

from trainer.rl.envs import Environment


class Vowels(Environment):
    """Wants vowels: the reward is their share of the completion's characters."""

    def sample(self, rng):
        return f"Vowels, {int(rng.integers(1000))} of them!", {}

    def score(self, info, completion):
        return sum(character in "aeiou" for character in completion) / max(1, len(completion))
