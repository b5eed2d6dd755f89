"""Why a resumed run is not the run that never stopped: the first difference, and what it says about its cause.

A step reads its samples and its lr, computes the loss with the weights before the update, then the gradient, then updates.
So the first value that differs, and the step it differs at, tell which part of the state did not come back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer.checkpoint.diff import Difference
from trainer.train.comparison import IDS, Rows, Value


@dataclass(frozen=True)
class Evidence:
    """What a check saw.

    Attributes:
        resumed_from: the step that the resumed process counted on from.
        values: of the uninterrupted run (a) and of the interrupted and resumed one (b), in the order of the steps.
        before: the same for the rows that the interrupted process wrote and the resumed one repeated.
        uninterrupted: the rows of a.
        differences: of the final checkpoints.
        repeated: how the uninterrupted run differs from itself when run twice; None = it was run only once.
        loaded: the step of the checkpoint that the resumed process had to load; None = not known.
    """

    resumed_from: int
    values: Sequence[Value]
    before: Sequence[Value]
    uninterrupted: Rows
    differences: Sequence[Difference]
    repeated: Sequence[Value] | None = None
    loaded: int | None = None


@dataclass(frozen=True)
class Diagnosis:
    """
    Attributes:
        first: the first value that differs; None where only the final checkpoints do.
        what: the difference in one line.
        cause: the likely reason, and what speaks for it.
        is_resume: whether the restore is suspected, and not the run itself.
    """

    first: Value | None
    what: str
    cause: str
    is_resume: bool = True


def diagnose(evidence: Evidence) -> Diagnosis | None:
    """Returns what differs first and why; None if nothing differs."""
    before = first_difference(evidence.before)
    first = first_difference(evidence.values)
    if first is None and before is None and not evidence.differences:
        return None
    if before is not None and (first is None or before.step <= first.step):
        first = before
        interrupted = True
    else:
        interrupted = first is not None and first.step <= evidence.resumed_from
    if first is None:
        return _only_states(evidence)
    what = _describe(first, evidence)
    own = first_difference(evidence.repeated or ())
    if own is not None:
        cause = (
            f"the uninterrupted run, started twice, differs from itself ({own.key} at step {own.step}), so this is not the "
            "resume: a kernel is not deterministic. Look at runtime.deterministic, model.attention and custom kernels"
        )
        return Diagnosis(first, what, cause, is_resume=False)
    if evidence.loaded is not None and evidence.loaded != evidence.resumed_from:
        cause = (
            f"the checkpoint was of step {evidence.loaded}, and the resumed run counted on from step "
            f"{evidence.resumed_from}: the progress counters were not restored"
        )
        return Diagnosis(first, what, cause)
    if interrupted:
        return Diagnosis(first, what, _BEFORE + _once(evidence), is_resume=False)
    return Diagnosis(first, what, _cause(first, evidence))


def first_difference(values: Sequence[Value]) -> Value | None:
    return next((value for value in values if value.verdict == "different"), None)


_BEFORE = (
    "the two runs differ before anything was interrupted, so this is not the resume: either a kernel is not deterministic, "
    "or writing a checkpoint changed the training"
)


def _once(evidence: Evidence) -> str:
    if evidence.repeated is None:
        return ". --repeat runs the uninterrupted run twice and tells which"
    return ". Two uninterrupted runs are equal, which speaks for the checkpoint"


def _describe(first: Value, evidence: Evidence) -> str:
    at_step = [value for value in evidence.values if value.step == first.step]
    agree = [value.key for value in at_step if value.verdict != "different" and value.key not in ("step", first.key)]
    if first.key == "step" or first.a is None or first.b is None:
        where = (
            "both runs"
            if first.a is None and first.b is None
            else f"the {'uninterrupted' if first.a is None else 'resumed'} run"
        )
        return f"step {first.step}: {where} has no {'row' if first.key == 'step' else first.key}"
    values = _ids_text(first) if first.key == IDS else f"{first.a!r} never stopped, {first.b!r} resumed"
    equal = f"; equal there: {', '.join(agree)}" if agree else ""
    return f"step {first.step}: {first.key} differs: {values}{equal}"


def _ids_text(first: Value) -> str:
    flat = [[sample for row in ids for sample in row] for ids in (first.a, first.b)]
    common = len(set(flat[0]) & set(flat[1]))
    return f"{', '.join(flat[0][:3])}, … never stopped, {', '.join(flat[1][:3])}, … resumed ({common} in common)"


def _cause(first: Value, evidence: Evidence) -> str:
    """The likely cause of a first difference that comes after the resume."""
    fresh = first.step == evidence.resumed_from + 1
    match first.key:
        case "ids":
            return "the data position was not restored" + _same_as(first, evidence, "the samples of step {}")
        case "epoch" | "samples" | "tokens" | "step":
            return "the progress counters were not restored, though the samples are the right ones"
        case "loss" if fresh:
            return (
                "the first step after the resume computes its loss with the weights as they were loaded, on the right "
                "samples: the weights were not restored exactly, or the forward pass draws other random numbers (dropout)"
            ) + _states(evidence)
        case "grad_norm" if fresh:
            return (
                "weights, samples and loss of this step are right, only the gradient differs: a backward kernel that is not "
                "deterministic, or random numbers in the backward pass; not the restore"
            ) + _suggest_repeat(evidence)
        case "loss" | "grad_norm":
            return (
                f"lr and samples agree, and the weights were right at step {evidence.resumed_from + 1}; the update was "
                "another one: the optimizer's state (moments, step counters, group entries such as betas or weight_decay) "
                "was not restored, or a kernel is not deterministic"
            ) + _states(evidence)
        case key if key.startswith("lr"):
            return "the schedule or the param groups were not restored" + _same_as(first, evidence, "the lr of step {}")
        case key if key.startswith("val"):
            return (
                "the training agrees so far, only the validation differs: held-out batches or their order"
                + _suggest_repeat(evidence)
            )
        case key:
            return f"everything that the step itself reads agrees; {key} comes from elsewhere" + _suggest_repeat(
                evidence
            )


def _same_as(first: Value, evidence: Evidence, what: str) -> str:
    """Whether the resumed run shows another step's value: then it started over, or is off by some steps."""
    for step, row in evidence.uninterrupted.items():
        if step and step != first.step and row.get(first.key) == first.b:
            where = what.format(step)
            if step == 1:
                return f": the resumed run has {where} there, so it started over"
            return f": the resumed run has {where} there, {abs(step - first.step)} {'late' if step < first.step else 'early'}"
    return ""


def _states(evidence: Evidence) -> str:
    """What the final checkpoints say beside it."""
    counters = [d for d in evidence.differences if d.key.endswith(".step")]
    if counters:
        return f". {counters[0].key}: {counters[0].text} in the final checkpoints" + _suggest_repeat(evidence)
    return _suggest_repeat(evidence)


def _suggest_repeat(evidence: Evidence) -> str:
    if evidence.repeated is None:
        return ". --repeat runs the uninterrupted run twice and tells whether its kernels are deterministic"
    return ". Two uninterrupted runs are equal: the kernels are deterministic, and the restore is at fault"


def _only_states(evidence: Evidence) -> Diagnosis:
    owners = list(dict.fromkeys(difference.owner for difference in evidence.differences))
    first = evidence.differences[0]
    what = f"every row agrees, but the final checkpoints differ in {', '.join(owners)}; first {first.key}: {first.text}"
    own = first_difference(evidence.repeated or ())
    if own is not None:
        return Diagnosis(
            None, what, f"the uninterrupted run differs from itself at step {own.step}, too", is_resume=False
        )
    cause = f"a part of {owners[0]} that the steps did not yet show was not restored" + _suggest_repeat(evidence)
    return Diagnosis(None, what, cause)
