"""How it is trained: optimizer, schedule, checkpoints, logging."""

from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, create_model

from trainer.config.base import Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimConfig(Section):
    """The update rule and gradient clipping."""

    type: Literal["adamw", "sgd"] = "adamw"
    """Update rule."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled decay for matrices; norms, biases and embeddings are never decayed."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """AdamW's term in the denominator."""
    momentum: Beta = 0.0
    """SGD's momentum."""
    max_norm: PositiveFloat | None = 1.0
    """Clip the global gradient norm to this; unset (None / "none") = no clipping."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose gradient norm is NaN or infinite: end the run, or leave the weights as they are and go on."""


class SchedulerConfig(Section):
    """The learning rate as a function of the step."""

    type: Literal["constant", "linear", "cosine"] = "linear"
    """"linear" = warmup, plateau, linear decay (WSD); "cosine" = warmup, then a half cosine to `min_lr`."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warmup from `min_lr` (at least 1e-8 of the peak) to the peak."""
    decay_steps: NonNegativeInt | None = None
    """"linear": steps of the final decay; unset = everything after the warmup, which "cosine" always takes."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the start of the warmup and at the end of the decay."""


# `async` is a word of the language: it can be a key of a table, but not be written as the name of a field.
_Async = create_model(
    "_Async",
    __base__=Section,
    **{
        "async": (
            bool,
            Field(
                default=False,
                description="Copy the state and train on while the copy is written; takes host memory of the state's size.",
            ),
        )
    },
)


class CkptConfig(_Async):
    """When checkpoints are written, and which ones are kept."""

    interval: NonNegativeInt = 0
    """Save every N steps; 0 = only at the end."""
    keep_last: PositiveInt | None = None
    """Keep the newest N resumable checkpoints; unset = all."""
    keep_every: PositiveInt | None = None
    """Checkpoints whose step is a multiple of this are kept for good."""
    keep_best: PositiveInt | None = None
    """Keep the N resumable checkpoints with the lowest val_loss as well; only steps that validated count."""
    at_end: bool = True
    """Write a checkpoint when training ends, at max_steps or stop_step."""
    verify: Literal["size", "checksum"] = "checksum"
    """What is checked of a checkpoint that is loaded: file sizes, or every byte's xxh3 checksum as well."""
    export_weights: bool = True
    """Write the final weights as a Hugging Face directory to weights/ when max_steps is reached."""

    @property
    def async_(self) -> bool:
        """`ckpt.async`."""
        return getattr(self, "async")


class ResumeConfig(Section):
    """Present = resume. A bare `--resume` takes the newest resumable checkpoint of `output_dir`."""

    dir: str | None = None
    """A step directory, or a run directory whose newest resumable step is taken. Another run's makes a fork."""
    step: NonNegativeInt | None = None
    """Resume from exactly this step; newer checkpoints of the run move to superseded/."""
    if_exists: bool = False
    """Start fresh when there is nothing to resume from (for jobs that are simply launched again)."""
    override: tuple[str, ...] = ()
    """Config keys that win over the checkpoint's, such as ["optim.lr", "scheduler"]. See docs/config.md."""


class WandbConfig(Section):
    """Weights & Biases."""

    mode: Literal["off", "offline", "online"] = "off"
    """"offline" needs no account; `wandb sync` uploads later. The run id is kept over resumes."""
    project: str = "exact-trainer"
    """Project name."""
    name: str | None = None
    """Display name; default: the name of the output directory."""
    entity: str | None = None
    """Team or user."""


class LogConfig(Section):
    """The console."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe message shown on the console; logs/ always holds debug."""
    interval: PositiveInt = 1
    """Console line every N steps where there is no terminal; metrics.jsonl has every step."""
    progress: Literal["auto", "on", "off"] = "auto"
    """Live progress bar; "auto" = when standard error is a terminal."""


class RuntimeConfig(Section):
    """The process and the machine."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where training runs; "auto" takes the GPU if there is one."""
    gc_interval: NonNegativeInt = 50
    """Python's garbage is collected every N steps, on all ranks at the same step; 0 = leave it to Python."""
    deterministic: bool = True
    """Ask torch for deterministic algorithms, which bit-exact resumes on a GPU need."""
    threads: NonNegativeInt = 0
    """OpenMP threads per process; 0 = OMP_NUM_THREADS if set, else the cores divided by the local ranks."""
    timeout_seconds: PositiveInt = 1800
    """A collective that waits longer than this ends the run."""
