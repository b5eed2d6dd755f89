"""The environments that ship with the trainer. In each, `info["answer"]` is a text with reward 1."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.rl.envs import Environment, Score

if TYPE_CHECKING:
    import numpy as np

_INTEGER = re.compile(r"-?\d+")


class ReverseText(Environment):
    """ "Reverse: abc" wants "cba".

    The reward is the share of places at which completion and answer have the same letter, of those of the longer one. It
    is 1 for the exact answer and only for that. Whitespace around the completion does not count.

    Args:
        min_length, max_length: letters of the text, from a to z.
        exact: reward 1 for the exact answer and 0 for any other.
    """

    def __init__(self, min_length: int = 3, max_length: int = 6, exact: bool = False):
        _check_range("length", min_length, max_length)
        self.min_length, self.max_length, self.exact = min_length, max_length, exact

    def sample(self, rng: "np.random.Generator") -> tuple[str, dict[str, Any]]:
        length = int(rng.integers(self.min_length, self.max_length + 1))
        text = "".join(chr(ord("a") + letter) for letter in rng.integers(26, size=length).tolist())
        return f"Reverse: {text}", {"answer": text[::-1]}

    def score(self, info: Mapping[str, Any], completion: str) -> Score:
        return _graded(completion.strip(), info["answer"], self.exact)


class Sort(Environment):
    """ "Sort: 41 7 93" wants "7 41 93", graded by its numbers as `ReverseText` is by letters.

    Args:
        min_length, max_length: how many numbers.
        largest: numbers are drawn from 0 to this.
        exact: reward 1 for the exact answer and 0 for any other.
    """

    def __init__(self, min_length: int = 3, max_length: int = 6, largest: int = 99, exact: bool = False):
        _check_range("length", min_length, max_length)
        _check_range("number", 1, largest)
        self.min_length, self.max_length, self.largest, self.exact = min_length, max_length, largest, exact

    def sample(self, rng: "np.random.Generator") -> tuple[str, dict[str, Any]]:
        length = int(rng.integers(self.min_length, self.max_length + 1))
        numbers = rng.integers(self.largest + 1, size=length).tolist()
        return f"Sort: {_joined(numbers)}", {"answer": _joined(sorted(numbers))}

    def score(self, info: Mapping[str, Any], completion: str) -> Score:
        return _graded(completion.split(), info["answer"].split(), self.exact)


class Arithmetic(Environment):
    """ "12 + 7 - 3 =" wants "16": reward 1 if the last integer in the completion is the result, else 0.

    Args:
        terms: numbers in an expression.
        largest: numbers are drawn from 0 to this.
        operators: drawn from these characters, of + - and *; * binds more tightly.
    """

    def __init__(self, terms: int = 2, largest: int = 99, operators: str = "+-"):
        _check_range("number", 1, largest)
        if terms < 2:
            raise ValueError(f"terms = {terms}; an expression has at least 2")
        if not operators or set(operators) - set("+-*"):
            raise ValueError(f"operators = {operators!r}; choose from + - and *")
        self.terms, self.largest, self.operators = terms, largest, operators

    def sample(self, rng: "np.random.Generator") -> tuple[str, dict[str, Any]]:
        numbers = rng.integers(self.largest + 1, size=self.terms).tolist()
        operators = [self.operators[which] for which in rng.integers(len(self.operators), size=self.terms - 1)]
        shown = "".join(f" {operator} {number}" for operator, number in zip(operators, numbers[1:], strict=True))
        return f"{numbers[0]}{shown} =", {"answer": str(_result(numbers, operators))}

    def score(self, info: Mapping[str, Any], completion: str) -> float:
        integers = _INTEGER.findall(completion)
        # Compared as text: a number of thousands of digits must not be converted.
        return float(bool(integers) and _without_zeros(integers[-1]) == info["answer"])


BUILT_IN: dict[str, type[Environment]] = {"reverse-text": ReverseText, "arithmetic": Arithmetic, "sort": Sort}


def _check_range(what: str, smallest: int, largest: int) -> None:
    if not (isinstance(smallest, int) and isinstance(largest, int)):
        raise TypeError(f"a {what} between {smallest!r} and {largest!r} is impossible; both must be integers")
    if not 1 <= smallest <= largest:
        raise ValueError(f"a {what} between {smallest} and {largest} is impossible; the smallest allowed is 1")


def _joined(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


def _result(numbers: Sequence[int], operators: Sequence[str]) -> int:
    products = [numbers[0]]
    for operator, number in zip(operators, numbers[1:], strict=True):
        if operator == "*":
            products[-1] *= number
        else:
            products.append(number if operator == "+" else -number)
    return sum(products)


def _without_zeros(integer: str) -> str:
    digits = integer.lstrip("-").lstrip("0") or "0"
    return f"-{digits}" if integer.startswith("-") and digits != "0" else digits


def _graded(found: Sequence[str], wanted: Sequence[str], exact_only: bool) -> Score:
    right = sum(a == b for a, b in zip(found, wanted, strict=False))
    share = right / max(len(found), len(wanted))
    exact = float(share == 1.0)
    return Score(exact if exact_only else share, {"exact": exact})
