"""What the command line of `python -m benchmarks` sets for every benchmark."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """
    Attributes:
        threads: OpenMP threads of every participant; each entry is measured by itself.
        smoke: the least that exercises every line, in seconds; the numbers mean nothing.
        peers: measure the other trainers too, installing them if need be; a smoke run leaves them out.
        rounds: blocks of each participant.
        block_seconds: length of a block; 0 = one step.
    """

    threads: tuple[int, ...] = (1, 2)
    smoke: bool = False
    peers: bool = True
    rounds: int = 9
    block_seconds: float = 1.0

    @classmethod
    def for_smoke(cls, *, threads: tuple[int, ...] = (1,), peers: bool = False) -> "Options":
        return cls(threads=threads, smoke=True, peers=peers, rounds=1, block_seconds=0.0)

    def settings(self) -> dict[str, float]:
        return {"rounds": self.rounds, "block_seconds": self.block_seconds}
