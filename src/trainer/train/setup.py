"""Builds a run from its config, in the order a reader would: place, data, model, optimizer, state, resume."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from trainer.checkpoint.app_state import AppState, Stateful
from trainer.checkpoint.discovery import Checkpoint
from trainer.checkpoint.manager import CheckpointManager
from trainer.config.load import Loaded
from trainer.config.run import RunConfig
from trainer.core import device as devices
from trainer.core import distributed
from trainer.core.distributed import World, on_main, world_from_env
from trainer.core.log import file_only, logger, setup_logging
from trainer.core.signals import Requests
from trainer.errors import CorruptCheckpoint, LaunchError, TrainerError, TrainingError, first_line
from trainer.models.base import CausalLM
from trainer.models.build import build_model, check_model
from trainer.models.files import has_weights
from trainer.models.hf import export_hf
from trainer.models.parallelize import has_failed_to_compile
from trainer.models.roles import parameter_roles
from trainer.models.state import ModelState
from trainer.models.tokenizer import load_tokenizer, vocabulary_rows
from trainer.optim.build import build_groups, build_optimizer, build_schedule, check_optimizer
from trainer.optim.groups import describe_group
from trainer.optim.offload.base import OffloadOptimizer
from trainer.optim.offload.build import build_offload
from trainer.optim.offload.weights import MasterWeights
from trainer.optim.schedule import ScheduleState
from trainer.optim.state import OptimizerState
from trainer.train import resume, rundir
from trainer.train.metrics import MetricsLog
from trainer.train.pending import OWNER, Pending, cut_of
from trainer.train.progress import Progress
from trainer.train.resume import ResumePlan
from trainer.train.run import Run
from trainer.train.supply import Place, Recipe

C = TypeVar("C", bound=RunConfig)


@contextmanager
def start(loaded: Loaded[C], recipe: Recipe, *, owns_process: bool = False) -> Iterator[Run]:
    """Yields the run, resumed if the config says so; closes what it opened, whatever happens inside.

    `owns_process`: the process ends with the run; see `Requests`.
    """
    config = loaded.config
    world = world_from_env()
    setup_logging(config.log.level, rank=world.rank)
    device = devices.select_device(config.runtime.device, world)
    devices.configure(device, threads=config.runtime.threads, deterministic=config.runtime.deterministic, world=world)
    with (
        _compilation_that_fails(),
        _memory_that_runs_out(),
        distributed.process_group(device, config.runtime.timeout_seconds),
        rundir.opened(config) as run_dir,
    ):
        setup_logging(config.log.level, run_dir / "logs", world.rank)
        with (
            _end_in_the_log(),
            _ranks_that_are_lost(world),
            _requests(config, run_dir, world, owns_process) as requests,
        ):
            run = _build_from_sound(loaded, recipe, world, device, run_dir, requests)
            with run.metrics, run.checkpoints:
                try:
                    run.supply.attach(run)
                    yield run
                finally:
                    run.supply.close()
                    _let_go(run.optimizer)


def finish(run: Run) -> int:
    """Exports the weights when training is complete. Returns the exit code: 0 unless the run was asked to stop."""
    if run.progress.step < run.max_steps or run.pending.row is not None:
        logger.info(f"stopped after step {run.progress.step} of {run.max_steps}; go on with --resume")
        return run.requests.exit_code if run.requests.stopping else 0
    if run.config.ckpt.export_weights:
        out_dir = run.run_dir / "weights"
        masters = run.weights.in_model(run.model) if isinstance(run.weights, MasterWeights) else nullcontext()
        with masters:
            export_hf(run.model, run.config.model.name, out_dir, tokenizer=run.tokenizer)
        logger.info(f"weights exported to {out_dir}")
    return 0


@contextmanager
def _compilation_that_fails() -> Iterator[None]:
    """Tells of it in words, wherever in the block it happens; compilers are started by the first step."""
    try:
        yield
    except RuntimeError as error:
        if not has_failed_to_compile(error):
            raise
        cause = getattr(error, "inner_exception", error)
        raise TrainingError(
            f"torch.compile fails here: {first_line(cause)}. The log holds all of it. Install the compiler "
            "it wants, or train without it: --model.compile off"
        ) from error


@contextmanager
def _memory_that_runs_out() -> Iterator[None]:
    """Tells of it in words, wherever in the block it happens."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not devices.is_out_of_memory(error):
            raise
        raise TrainingError(
            f"out of memory: {first_line(error)}. Less is needed with a smaller data.micro_batch_size (same step) or "
            'data.seq_len, model.activation_checkpointing = "full", model.offload = "full", or more ranks to shard over'
        ) from error


@contextmanager
def _ranks_that_are_lost(world: World) -> Iterator[None]:
    """Tells in words that another rank is gone, wherever in the block a collective finds out."""
    try:
        yield
    except RuntimeError as error:
        if not distributed.has_lost_a_rank(error):
            raise
        raise TrainingError(
            f"rank {world.rank} of {world.size} has lost another rank: {first_line(error)}. Why that one ended is the first "
            "error above or in logs/rank_*.log; where there is none it was killed, as for want of memory. Go on with --resume"
        ) from error


@contextmanager
def _end_in_the_log() -> Iterator[None]:
    """Writes why a run fails into its log: the terminal may be gone when somebody asks."""
    try:
        yield
    except Exception as error:
        fault = None if isinstance(error, TrainerError) else error
        file_only.opt(exception=fault).error("the run ends with {}: {}", type(error).__name__, error)
        raise


def _requests(config: RunConfig, run_dir: Path, world: World, owns_process: bool) -> Requests:
    return Requests(
        run_dir,
        rank=world.rank,
        grace_seconds=config.ckpt.grace_seconds,
        exit_code=config.ckpt.signal_exit_code,
        save_minutes=config.ckpt.minutes,
        stop_minutes=config.ckpt.stop_minutes,
        owns_process=owns_process,
    )


def _build_from_sound(
    loaded: Loaded[C],
    recipe: Recipe,
    world: World,
    device: torch.device,
    run_dir: Path,
    requests: Requests,
) -> Run:
    """Builds the run. A checkpoint is checked while it is read: where it is damaged, all is built anew on another one."""
    damaged: dict[Path, str] = {}
    while True:
        known = len(damaged)
        if damaged:
            gc.collect()  # what was built for the damaged one is not held beside what is built now
        try:
            return _build(loaded, recipe, world, device, run_dir, requests, damaged)
        except CorruptCheckpoint:
            if len(damaged) == known:  # nothing new: it was asked for by name
                raise


def _build(
    loaded: Loaded[C],
    recipe: Recipe,
    world: World,
    device: torch.device,
    run_dir: Path,
    requests: Requests,
    damaged: dict[Path, str],
) -> Run:
    config = loaded.config
    check_optimizer(config.optim)
    state = AppState()  # the owners join below; a checkpoint is chosen before anything expensive is built
    checkpoints = CheckpointManager(run_dir, config.ckpt, state, describe=lambda: _describe(config, state, mesh))
    checkpoint = checkpoints.choose(config.resume, damaged) if config.resume is not None else None
    plan = resume.plan(config, checkpoint.manifest.run.get("config")) if checkpoint is not None else ResumePlan()
    config = resume.effective(config, plan, loaded.origins)
    run_id = on_main(rundir.write_identity, config, resume.origins(loaded.origins, plan), run_dir)

    mesh = distributed.build_mesh(device.type, config.parallel.dp_replicate, config.parallel.dp_shard, world.size)
    check_model(config.model, values=checkpoint is None)
    tokenizer = load_tokenizer(config.model) if config.data.fake is None else None
    supply = recipe(Place(config, world, device, mesh, run_dir, tokenizer, plan.override_data))
    max_steps = supply.max_steps
    vocab_size = vocabulary_rows(tokenizer) if tokenizer is not None else 0
    model = build_model(
        config.model,
        mesh=mesh,
        device=device,
        seed=config.seed,
        vocab_size=vocab_size,
        values=checkpoint is None,
    )
    optimizer, weights = _optimizer(config, model)
    start_step = resume.start_of_schedule(config, plan, checkpoint.step if checkpoint else 0, max_steps)
    schedule = ScheduleState(
        build_schedule(config.scheduler, lr=config.optim.lr, total_steps=max_steps - start_step, start_step=start_step),
        optimizer.param_groups,
        overridden=plan.override_scheduler,
        keeps_floor="lr" in plan.keep_group_entries,
    )
    progress = Progress()
    regroups = config.resume is not None and config.resume.regroup
    state.owners |= {
        "model": weights,
        "optimizer": OptimizerState(optimizer, keep=plan.keep_group_entries, regroup=regroups),
        "schedule": schedule,
        "progress": progress,
        "data": supply.batches,
    }
    pending = Pending(optimizer)
    if checkpoint is not None:
        try:
            _load(checkpoints, checkpoint, plan, pending, cut_of(config, world))
        except CorruptCheckpoint as error:
            damaged[checkpoint.path] = str(error)
            supply.close()
            _let_go(optimizer)
            raise
        if "lr" not in plan.keep_group_entries and not plan.override_scheduler:
            schedule.check_lr(checkpoint.step)
    schedule.apply(progress.step)
    last_step = min(max_steps, config.stop_step or max_steps)
    if last_step <= progress.step < max_steps and pending.row is None:
        raise LaunchError(
            f"nothing would be trained: the run is at step {progress.step} of {max_steps}, and stop_step is {last_step}. "
            "Raise stop_step, or leave it out to train to the end"
        )
    if progress.step < last_step:
        checkpoints.check_space()
    run = Run(
        config=config,
        run_dir=run_dir,
        world=world,
        device=device,
        model=model,
        tokenizer=tokenizer,
        weights=weights,
        optimizer=optimizer,
        schedule=schedule,
        supply=supply,
        progress=progress,
        checkpoints=checkpoints,
        pending=pending,
        boundaries=supply.boundaries(),
        requests=requests,
        metrics=MetricsLog(
            run_dir,
            config,
            is_main=world.is_main,
            start_step=progress.step,
            max_steps=max_steps,
            run_id=run_id,
            fresh=checkpoint is None,
            redo=pending.row is not None,
        ),
        max_steps=max_steps,
        last_step=last_step,
        resumed_from=progress.step if checkpoint is not None else None,
    )
    _announce(run, plan, checkpoint)
    return run


def _optimizer(config: RunConfig, model: CausalLM) -> tuple[Optimizer, Stateful]:
    """Returns the optimizer in its offload mode, and the owner of the float32 weights it updates."""
    roles = parameter_roles(model)
    device = next(model.parameters()).device
    # In mode "full" a step runs on the host, where matrix products are slow beside an accelerator's.
    compute_device = device if config.model.offload == "full" and device.type != "cpu" else None
    offloaded = build_offload(
        config.model.offload,
        partial(build_optimizer, config.optim, compute_device=compute_device),
        build_groups(config.optim, model.named_parameters(), roles),
        model,
        ModelState(model),
        compute_dtype=model.compute_dtype,
        float32=[name for name, role in roles.items() if role == "embedding"],
    )
    return offloaded.optimizer, offloaded.weights


def _let_go(optimizer: Optimizer) -> None:
    if isinstance(optimizer, OffloadOptimizer):
        optimizer.close()


def _load(
    checkpoints: CheckpointManager, checkpoint: Checkpoint, plan: ResumePlan, pending: Pending, cut: dict[str, int]
) -> None:
    """Loads the checkpoint, but for what the plan leaves out and for gradients that do not fit this run's micro-steps."""
    about = checkpoint.manifest.pending
    if about is None:
        checkpoints.load(checkpoint, skip=plan.skip)
        return
    skip = plan.skip
    if plan.skip or plan.override_data or about.get("cut", cut) != cut:
        skip |= {OWNER}
        logger.info(
            f"what is pending in the checkpoint ({about}) does not fit this run: the step is done from its beginning"
        )
    else:
        pending.expect(about.get("micro_step", 0))
    with checkpoints.app.joined_by({OWNER: pending}):
        checkpoints.load(checkpoint, skip=skip)


def _describe(config: RunConfig, state: AppState, mesh: DeviceMesh | None) -> dict[str, Any]:
    """What a manifest says about the run, beside the state itself."""
    data = {
        key: value for key, value in state.owners["data"].state_dict().items() if key in ("version", "cursor", "order")
    }
    return {
        "config": config.model_dump(mode="json"),
        "schedule": state.owners["schedule"].state_dict(),
        "data": data,
        "device": config.runtime.device,
        "mesh": {} if mesh is None else dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)),
    }


def _announce(run: Run, plan: ResumePlan, checkpoint: Checkpoint | None) -> None:
    """The first lines of every run: where from, on what, how far. A resume can never be mistaken for a fresh start."""
    config = run.config
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    ranks = f"{run.world.size} rank{'s' if run.world.size > 1 else ''}"
    place = f"{config.model.dtype} on {ranks} x {devices.describe(run.device)}"
    logger.info(f"{config.model.name}: {parameters / 1e6:.1f} M parameters, {place}")
    if isinstance(run.optimizer, OffloadOptimizer):
        host_gib = run.optimizer.host_bytes / 2**30
        logger.info(f"model.offload = {run.optimizer.mode}: {host_gib:.2f} GiB of host memory on each rank")
    for group in run.optimizer.param_groups:
        logger.info(f"  {describe_group(group)}")
    if checkpoint is None:
        source = "random weights" if config.model.random_init else f"weights of {config.model.name}"
        logger.info(f"fresh start: {source}, step 0, new optimizer, data from its beginning")
        if config.model.random_init and has_weights(Path(config.model.name)):
            logger.warning(f"model.random_init: the weights in {config.model.name} are not read")
    else:
        left_out = f", without {', '.join(sorted(plan.skip))}" if plan.skip else ""
        cycle = f" and {run.pending.micro_step} micro-steps" if run.pending.micro_step else ""
        logger.info(
            f"resumed from {checkpoint.path}: step {run.progress.step}{cycle}, optimizer, schedule and data position{left_out}"
        )
        for difference in plan.differences:
            logger.info(f"  {difference}")
        _warn_of_steps_past_the_schedule(run)
    logger.info(f"training to step {run.last_step} of {run.max_steps}; {run.run_dir}/metrics.jsonl")


def _warn_of_steps_past_the_schedule(run: Run) -> None:
    """A run that was made longer trains on at the last lr of the checkpoint's schedule, often zero, and looks healthy."""
    schedule = run.schedule.schedule
    end = schedule.start_step + schedule.total_steps
    if schedule.type == "constant" or run.last_step <= end:
        return
    last = run.optimizer.param_groups[0]["initial_lr"] * schedule.factor(end)
    logger.warning(
        f"the checkpoint's schedule ends at step {end}: steps {max(end, run.progress.step) + 1} to {run.last_step} run at its "
        f"last lr, {last:.2e}; --resume.override scheduler stretches it to this run's length"
    )
