"""How it is trained: optimizer, schedule, checkpoints, logging."""

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, create_model

from trainer.config.base import Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]


class OptimConfig(Section):
    """The update rule and gradient clipping."""

    type: Literal["adamw", "sgd", "sign_sgd", "muon", "custom"] = "adamw"
    """Update rule. "muon": orthogonalised momentum for hidden matrices, AdamW for everything else; "custom": `class_path`."""
    lr: PositiveFloat = 1e-5
    """Peak learning rate; for Muon, of its matrices."""
    weight_decay: NonNegativeFloat = 0.01
    """Decay of what `decay` names: decoupled from the gradient, but for "sgd", which adds it to the gradient as torch's does."""
    decay: Literal["matrices", "weights", "all"] = "matrices"
    """What decays: "matrices" and the output head; "weights" = embeddings too (as the Hugging Face Trainer does); or
    "all", norms and biases too."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment (Muon's AdamW half included)."""
    eps: PositiveFloat = 1e-8
    """AdamW's term in the denominator (Muon's AdamW half included)."""
    momentum: Beta | None = None
    """Momentum of SGD and SignSGD (unset = 0) and of Muon (unset = 0.95)."""
    adamw_lr: PositiveFloat | None = None
    """Muon: peak learning rate of its AdamW half; unset = `lr`, which suits adjust_lr = "rms_norm"."""
    nesterov: bool = True
    """Muon: look one step ahead in the momentum."""
    adjust_lr: Literal["rms_norm", "spectral_norm", "none"] = "rms_norm"
    """Muon: scale the update by the matrix's shape; "rms_norm" gives it the size of an AdamW update."""
    ns_coefficients: Literal["quintic", "polar_express"] = "quintic"
    """Muon: coefficients of the orthogonalisation."""
    ns_steps: PositiveInt = 5
    """Muon: iterations of the orthogonalisation; 5 bring the singular values near enough to 1."""
    implementation: Literal["own", "dion"] = "own"
    """Muon: ours, or microsoft/dion's where it is installed; groups and checkpoints are the same."""
    class_path: str | None = None
    """type = "custom": import path of a torch Optimizer, such as "torch.optim.Adafactor"; called with the groups and `lr`."""
    args: tuple[str, ...] = ()
    """type = "custom": more arguments as "name=value", each value JSON, such as ["momentum=0.9", "nesterov=true"]."""
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
    decay_shape: Literal["linear", "sqrt"] = "linear"
    """"linear": shape of the final decay; "sqrt" falls as 1 - sqrt(fraction), steeper at first (WSD with a sqrt cooldown)."""
    min_lr: NonNegativeFloat = 0.0
    """Learning rate at the start of the warmup and at the end of the decay."""


# `async` is a word of the language: it can be a key of a table, but not be written as the name of a field.
_Async: Any = create_model(  # pyright: ignore[reportCallIssue]
    "_Async",
    __base__=Section,
    **{  # pyright: ignore[reportArgumentType]
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
    """Save every N steps; 0 = not by the step."""
    micro_interval: NonNegativeInt = 0
    """Save every N micro-steps, at the next step boundary after each N; 0 = not by the micro-step."""
    minutes: PositiveFloat | None = None
    """Save at the next step boundary when this much time has passed since the last save."""
    at: tuple[PositiveInt, ...] = ()
    """Save after these steps too."""
    on_signal: Literal["boundary", "now"] = "boundary"
    """SIGTERM, SIGUSR1 and SAVE/STOP files are served after the step ("boundary"), or after the micro-step ("now"): then
    the gradients so far are saved too, and the resumed run finishes the cycle."""
    grace_seconds: float = Field(default=600.0, gt=0.0, le=1e7)
    """Give up this long after a signal to stop, whatever the run is waiting for; a save that is being written is
    finished. The launcher's own patience must be longer."""
    stop_minutes: PositiveFloat | None = None
    """Stop as SIGTERM does once the process has run for this long: a queue's time limit, less the time of a save."""
    signal_exit_code: int = Field(default=143, ge=0, le=255)
    """Exit code of a run that was asked to stop and saved; 143 tells a controller that it is not finished."""
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
    skip_optimizer: bool = False
    """Resume without the optimizer's state and group entries: the config's lr, betas and weight decay, new moments."""
    skip_scheduler: bool = False
    """Resume with the config's schedule, begun anew over the steps that are left; its peak is the groups' saved peak."""
    skip_dataloader: bool = False
    """Resume with the data at its beginning."""
    skip_progress: bool = False
    """Resume with step, token and sample counters at zero; needs an output_dir of its own."""

    @property
    def async_(self) -> bool:
        """`ckpt.async`."""
        return getattr(self, "async")


class ResumeConfig(Section):
    """Present = resume. A bare `--resume` takes the newest resumable checkpoint of `output_dir`."""

    dir: str | None = Field(default=None, min_length=1)
    """A step directory, or a run directory whose newest resumable step is taken. Another run's makes a fork."""
    step: NonNegativeInt | None = None
    """Resume from exactly this step; newer checkpoints of the run move to superseded/."""
    if_exists: bool = False
    """Start fresh when there is nothing to resume from (for jobs that are simply launched again)."""
    regroup: bool = False
    """Let param groups have other members than in the checkpoint: each parameter brings the entries of its saved group."""
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
    threads: int = Field(default=0, ge=0, le=4096)
    """OpenMP threads per process; 0 = OMP_NUM_THREADS if set, else the cores divided by the local ranks."""
    timeout_seconds: int = Field(default=1800, ge=1, le=10**7)
    """A collective that waits longer than this ends the run."""
