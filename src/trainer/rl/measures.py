"""What the objective tells about a batch besides the loss: sums and maxima that add up over micro-batches and ranks."""

from dataclasses import dataclass

from torch import Tensor

from trainer.core.distributed import gather_objects


@dataclass(frozen=True)
class Measures:
    """Sums and maxima over trained tokens. Both have the same keys for every micro-batch of a run.

    Attributes:
        sums: 0-dim float64. "tokens" counts them; the mean of anything else is its sum / tokens:
            "ratio": probability now / in the ratio's denominator; "clip_low", "clip_high": tokens below, above the clip
            range that it took the gradient from (or, cispo, limited the weight of); "masked": tokens outside the trust
            region; "mismatch": |engine's - trainer's log-probability|; where computed "entropy" in nats and "kl", the
            configured estimator of the divergence from the reference.
        maxima: 0-dim float64: "mismatch_max", and "ratio_deviation_max" of |ratio - 1|.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def __add__(self, other: "Measures") -> "Measures":
        return Measures(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: value.maximum(other.maxima[name]) for name, value in self.maxima.items()},
        )

    def over_ranks(self) -> dict[str, float]:
        """Returns "tokens", the mean over all ranks' tokens of every other sum, and all maxima. Collective."""
        own = [{name: value.item() for name, value in part.items()} for part in (self.sums, self.maxima)]
        sums, maxima = zip(*gather_objects(own), strict=True)
        total = {name: sum(part[name] for part in sums) for name in self.sums}
        tokens = total.pop("tokens")
        means = {name: value / max(1.0, tokens) for name, value in total.items()}
        return {"tokens": tokens} | means | {name: max(part[name] for part in maxima) for name in self.maxima}
