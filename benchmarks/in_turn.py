"""What workers share that compare forms of one call."""

import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.gate import Gate, Stopped


def run_in_turn(forms: Mapping[str, Callable[[], None]], tokens: int) -> None:
    """Calls each form once per step, in alternating order, until there is no further order.

    The answer's notes tell each form's seconds.
    """
    gate = Gate(torch.set_num_threads)
    count = 0
    try:
        while True:
            gate.before_step()
            gate.count(tokens)
            for name in list(forms)[:: 1 if count % 2 else -1]:
                started = time.perf_counter()
                forms[name]()
                gate.add(**{name: time.perf_counter() - started})
            count += 1
    except Stopped:
        pass
