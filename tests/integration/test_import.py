"""`trainer ckpt import`: what comes in is what was there, and the run that goes on is a plain torch loop's."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from support import foreign, runs
from support.foreign import ForeignRun
from trainer.checkpoint.diff import open_contents
from trainer.checkpoint.manifest import read_manifest
from trainer.checkpoint.verify import verify
from trainer.cli.ckpt import main
from trainer.config.load import load_config
from trainer.config.run import SFTConfig
from trainer.errors import CheckpointError, CheckpointMismatch, ModelError
from trainer.train.importing import Imported, import_checkpoint

COSINE = ["--scheduler.type", "cosine", "--scheduler.warmup-steps", "2", "--optim.lr", "2e-3"]


def config(*flags: str) -> SFTConfig:
    import os

    os.chdir(runs.REPO)  # the debug config's paths are relative to the repository
    return load_config(SFTConfig, [*runs.DEBUG, *flags]).config


def brought_in(source: Path, out: Path, *flags: str, **options) -> Imported:
    return import_checkpoint(source, out, config(*(flags or COSINE)), **options)


def holds(path: Path, run: ForeignRun) -> None:
    """Asserts that a checkpoint has the weights, moments and step counters of `run`, bit for bit, and no others."""
    contents = open_contents(path)
    expected = {}
    for name, entries in run.state().items():
        expected[f"model.{name}"] = entries["weight"]
        expected |= {f"optimizer.state.{name}.{entry}": value for entry, value in entries.items() if entry != "weight"}
    assert set(contents.tensors()) == set(expected)
    for name, tensor in expected.items():
        bits = torch.from_numpy(contents.bits(name).reshape(-1).view("u1")).view(torch.float32).reshape(tensor.shape)
        assert torch.equal(bits, tensor), name


def plain_loop(run: ForeignRun, source: Path, flags: list[str], last_step: int) -> torch.nn.Module:
    """Continues from the files with torch's AdamW and transformers' schedule, on this trainer's batches from the first."""
    from trainer.core.distributed import World
    from trainer.data.build import build_data
    from trainer.data.loader import BatchLoader
    from trainer.models.build import build_model
    from trainer.models.tokenizer import load_tokenizer
    from trainer.train.cross_entropy import cross_entropy

    settings = config(*flags)
    data = build_data(settings.data, tokenizer=load_tokenizer(settings.model), seed=settings.seed, world=World())
    loader = BatchLoader(data.train, settings.data, seed=settings.seed, rank=0, world_size=1)
    section = settings.model.model_copy(update={"name": str(source), "random_init": False})
    model = build_model(section, mesh=None, device=torch.device("cpu"), seed=0)
    by_name = dict(model.named_parameters())
    numbered = [[by_name[n] for n in names] for names in group_names(run)]
    optimizer = torch.optim.AdamW([{"params": parameters} for parameters in numbered], lr=1.0, fused=True)
    saved = torch.load(source / "optimizer.pt", weights_only=True)
    for group in saved["param_groups"]:
        group |= {"fused": True, "foreach": None}
    optimizer.load_state_dict(saved)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 2, 10)
    scheduler.load_state_dict(torch.load(source / "scheduler.pt", weights_only=True))
    for group, lr in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = lr  # making a scheduler writes its first lr into the groups
    for _ in range(run.step, last_step):
        batch = loader.next_batch()
        for micro_batch in batch.micro_batches:
            (cross_entropy(model, micro_batch) / batch.supervised_tokens).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model


def group_names(run: ForeignRun) -> list[list[str]]:
    names = {id(p): name for name, p in run.model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in run.optimizer.param_groups]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_hugging_face_run_goes_on_as_a_plain_loop_would(tmp_path, weight_decay):
    run = ForeignRun(weight_decay=weight_decay).train(5)
    source = run.save_hf_trainer(tmp_path / "checkpoint-5")
    done = brought_in(source, tmp_path / "in")
    assert done.step == 5 and done.path == tmp_path / "in/checkpoints/step_00000005"
    holds(done.path, run)
    assert verify(done.path).sound

    flags = [*COSINE, "--optim.max-norm", "none"]
    runs.sft(tmp_path / "run", *flags, "--resume.dir", str(tmp_path / "in"))
    expected = plain_loop(run, source, flags, 10)
    contents = open_contents(runs.checkpoint(tmp_path / "run", 10))
    for name, parameter in expected.named_parameters():
        bits = torch.from_numpy(contents.bits(f"model.{name}").view("u1")).view(torch.float32)
        assert torch.equal(bits.reshape(parameter.shape), parameter), name
    assert [row["step"] for row in runs.metrics(tmp_path / "run")] == [6, 7, 8, 9, 10]
    assert read_manifest(runs.checkpoint(tmp_path / "run", 10)).parent["step"] == 5


def test_the_comparison_above_would_see_one_lost_moment(tmp_path):
    run = ForeignRun().train(5)
    source = run.save_hf_trainer(tmp_path / "checkpoint-5")
    saved = torch.load(source / "optimizer.pt", weights_only=True)
    saved["state"][3]["exp_avg"].zero_()
    torch.save(saved, source / "optimizer.pt")
    done = brought_in(source, tmp_path / "in")
    with pytest.raises(AssertionError, match="exp_avg"):
        holds(done.path, run)


def test_the_run_goes_on_in_the_imported_directory_itself(tmp_path):
    source = ForeignRun().train(5).save_hf_trainer(tmp_path / "checkpoint-5")
    brought_in(source, tmp_path / "run")
    runs.sft(tmp_path / "run", *COSINE, "--resume", "--stop-step", "7")
    assert [row["step"] for row in runs.metrics(tmp_path / "run")] == [6, 7]


def test_what_decays_is_what_decayed(tmp_path):
    """The Trainer decays embeddings, this trainer by default does not: the checkpoint's rule wins."""
    run = ForeignRun(weight_decay=0.1).train(3)
    done = brought_in(run.save_hf_trainer(tmp_path / "checkpoint-3"), tmp_path / "in")
    saved = read_manifest(done.path).run["config"]["optim"]
    assert (saved["decay"], saved["weight_decay"], saved["betas"], saved["lr"]) == ("weights", 0.1, [0.9, 0.999], 2e-3)
    groups = open_contents(done.path).leaves["optimizer"]["groups"]
    names = {name: group["entries"]["weight_decay"] for group in groups for name in group["param_names"]}
    theirs = {
        name: g["weight_decay"]
        for g, own in zip(run.optimizer.param_groups, group_names(run), strict=True)
        for name in own
    }
    assert names == theirs


def test_a_decay_that_no_rule_makes_is_refused_by_name(tmp_path):
    def groups(model, weight_decay):
        named = list(model.named_parameters())
        return [
            {"params": [p for n, p in named if "q_proj" in n], "weight_decay": 0.3},
            {"params": [p for n, p in named if "q_proj" not in n], "weight_decay": 0.1},
        ]

    run = ForeignRun(groups=groups).train(2)
    source = run.save_hf_trainer(tmp_path / "checkpoint-2")
    with pytest.raises(CheckpointError, match="cannot be told apart"):
        brought_in(source, tmp_path / "in")
    saved = torch.load(source / "optimizer.pt", weights_only=True)
    for group, names in zip(saved["param_groups"], group_names(run), strict=True):
        group["param_names"] = names  # as an optimizer keeps them that was given named parameters
    torch.save(saved, source / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"weight decay \[0.1, 0.3\] is spread"):
        brought_in(source, tmp_path / "in")
    assert not (tmp_path / "in").exists()


def test_accelerate(tmp_path):
    run = ForeignRun().train(4)
    for processes in (1, 4):
        source = run.save_accelerate(tmp_path / f"state-{processes}", processes)
        done = brought_in(source, tmp_path / f"in-{processes}")
        assert (done.kind, done.step) == ("Accelerate", 4)
        holds(done.path, run)


class TestSchedules:
    """lr after the import and at each later step is the other trainer's."""

    @pytest.mark.parametrize("at", [3, 7])
    @pytest.mark.parametrize("name", ["linear", "cosine", "constant_with_warmup"])
    def test_transformers(self, name, at, tmp_path):
        run = ForeignRun(schedule=lambda o: transformers.get_scheduler(name, o, 2, 10)).train(at)
        ours = {"constant_with_warmup": "constant"}.get(name, name)
        source = run.save_hf_trainer(tmp_path / "source")
        flags = ["--scheduler.type", ours, "--scheduler.warmup-steps", "2", "--optim.lr", "1e-3"]
        done = brought_in(source, tmp_path / "in", *flags)
        self.follows(done.path, run, 10)

    def test_the_log_is_held_against_it_as_well(self, tmp_path):
        """At its half a linear and a cosine decay meet: only the log tells them apart."""
        run = ForeignRun(schedule=lambda o: transformers.get_scheduler("linear", o, 2, 10)).train(6)
        source = run.save_hf_trainer(tmp_path / "source")
        with pytest.raises(CheckpointError, match="not those that the log holds"):
            brought_in(source, tmp_path / "in")

    def test_another_schedule_is_refused_with_both_values(self, tmp_path):
        source = ForeignRun().train(5).save_hf_trainer(tmp_path / "source")
        flags = ["--scheduler.type", "constant", "--optim.lr", "2e-3"]
        with pytest.raises(CheckpointError, match=r"0.69134172 of its peak at step 5.*gives 1:.*--schedule config"):
            brought_in(source, tmp_path / "in", *flags)
        done = brought_in(source, tmp_path / "in", *flags, schedule_of_config=True)
        assert open_contents(done.path).leaves["schedule"]["type"] == "constant"

    @pytest.mark.parametrize("at", [1, 3, 9])
    @pytest.mark.parametrize("shape", ["linear", "cosine", "constant", "warmup"])
    def test_prime_rl(self, shape, at, tmp_path):
        """Its whole shape is in the state, so it is taken from there, whatever the config says."""

        def schedule(optimizer):
            from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

            def ramp():
                return LinearLR(optimizer, start_factor=1e-8, end_factor=1.0, total_iters=2)

            if shape == "constant":
                return ConstantLR(optimizer, factor=1.0)
            if shape == "warmup":
                return ramp()
            if shape == "cosine":
                return SequentialLR(optimizer, [ramp(), CosineAnnealingLR(optimizer, T_max=8, eta_min=1e-4)], [2])
            flat = LinearLR(optimizer, start_factor=1.0, end_factor=1.0, total_iters=4)
            decay = LinearLR(optimizer, start_factor=1.0, end_factor=1e-8, total_iters=3)
            return SequentialLR(optimizer, [ramp(), flat, decay], [2, 6])

        run = ForeignRun(schedule=schedule, groups=one_group).train(at)
        if shape == "cosine":  # its own warmup starts at 1e-8 although eta_min is not 0: no schedule of ours
            with pytest.raises(CheckpointError, match="T_max 8, eta_min 0.0001.*no schedule of this trainer"):
                brought_in(run.save_prime_rl(tmp_path / "source"), tmp_path / "in")
            return
        done = brought_in(run.save_prime_rl(tmp_path / "source"), tmp_path / "in")
        self.follows(done.path, run, 10)

    def test_torchs_own_schedulers_in_a_hugging_face_directory(self, tmp_path):
        """Their shape is in scheduler.pt; the config's, which gives the same lr at this step, is not asked."""

        def schedule(optimizer):
            return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)

        run = ForeignRun(schedule=schedule).train(6)
        flags = ["--scheduler.type", "cosine", "--optim.lr", "2e-3"]
        done = brought_in(run.save_hf_trainer(tmp_path / "source"), tmp_path / "in", *flags)
        assert open_contents(done.path).leaves["schedule"]["total_steps"] == 12
        self.follows(done.path, run, 12)

    @staticmethod
    def follows(path: Path, run: ForeignRun, last_step: int) -> None:
        from trainer.optim.schedule import Schedule

        leaves = open_contents(path).leaves
        schedule = Schedule(**leaves["schedule"])
        for step in range(run.step, last_step):
            for group in leaves["optimizer"]["groups"]:
                expected = run.scheduler.get_last_lr()[0]
                assert group["entries"]["initial_lr"] * schedule.factor(step) == pytest.approx(
                    expected, rel=1e-6, abs=2e-11
                )
            run.train(1)


def one_group(model, weight_decay):
    return [{"params": list(model.parameters()), "weight_decay": weight_decay}]


class TestDcp:
    def test_prime_rl(self, tmp_path):
        run = ForeignRun(groups=one_group, weight_decay=0.1, schedule=linear_lr).train(4)
        source = run.save_prime_rl(tmp_path / "step_4/trainer")
        done = brought_in(tmp_path / "step_4", tmp_path / "in")
        assert (done.kind, done.step) == ("prime-rl", 4)
        holds(done.path, run)
        contents = open_contents(done.path)
        assert contents.leaves["progress"]["tokens"] == 480 and contents.leaves["progress"]["samples"] == 10
        assert read_manifest(done.path).run["config"]["optim"]["decay"] == "all"
        runs.sft(tmp_path / "run", "--resume.dir", str(tmp_path / "in"), "--stop-step", "6")
        assert [row["lr"] for row in runs.metrics(tmp_path / "run")] == pytest.approx([2e-3 * 4 / 8, 2e-3 * 5 / 8])
        assert source.exists()

    def test_its_counter_may_name_the_next_step(self, tmp_path):
        run = ForeignRun(groups=one_group, schedule=linear_lr).train(4)
        assert brought_in(run.save_prime_rl(tmp_path / "a", step=5), tmp_path / "in").step == 4
        with pytest.raises(CheckpointError, match="counted different numbers of updates"):
            brought_in(run.save_prime_rl(tmp_path / "b", step=7), tmp_path / "in")

    @pytest.mark.parametrize("tied", [True, False])
    def test_torchtitan(self, tied, tmp_path):
        model_dir = foreign.TINY if tied else foreign.tiny_untied(tmp_path / "untied")
        run = ForeignRun(groups=one_group, weight_decay=0.1, model_dir=model_dir).train(5)
        source = run.save_torchtitan(tmp_path / "step-5")
        done = brought_in(source, tmp_path / "in", *COSINE, "--model.name", str(model_dir))
        assert (done.kind, done.step) == ("torchtitan", 5)
        holds(done.path, run)

    def test_shards_of_two_ranks_are_put_together(self, tmp_path):
        from support.pool import run_on_ranks

        run_on_ranks(save_sharded_dcp, 2, str(tmp_path / "source"))
        run = ForeignRun(groups=one_group, schedule=linear_lr).train(3)
        done = brought_in(tmp_path / "source", tmp_path / "in")
        holds(done.path, run)
        assert len(list((tmp_path / "source").glob("*.distcp"))) == 2

    def test_other_optimizers_are_refused_by_name(self, tmp_path):
        run = ForeignRun(groups=one_group, schedule=linear_lr).train(2)
        for state in run.optimizer.state.values():
            state["momentum_buffer"] = state.pop("exp_avg")
        with pytest.raises(CheckpointError, match="momentum_buffer' is no state of AdamW"):
            brought_in(run.save_prime_rl(tmp_path / "source"), tmp_path / "in")

    def test_other_directories_are_refused_by_name(self, tmp_path):
        foreign.save_dcp({"net": {"weight": torch.ones(3)}}, tmp_path / "source")
        with pytest.raises(CheckpointError, match="neither prime-rl's nor torchtitan's .it has net.weight"):
            brought_in(tmp_path / "source", tmp_path / "in")


def linear_lr(optimizer):
    return torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1e-8, end_factor=1.0, total_iters=8)


def save_sharded_dcp(path: str) -> None:
    """On two ranks: prime-rl's layout with every matrix sharded by rows, as FSDP2 has them."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    run = ForeignRun(groups=one_group, schedule=linear_lr).train(3)
    mesh = init_device_mesh("cpu", (2,))
    model, optimizer = get_state_dict(run.model, [run.optimizer])
    model = {name: distribute_tensor(tensor.detach(), mesh, [Shard(0)]) for name, tensor in model.items()}
    for entries in optimizer["state"].values():
        for entry in ("exp_avg", "exp_avg_sq"):
            entries[entry] = distribute_tensor(entries[entry], mesh, [Shard(0)])
    scheduler, progress = run.scheduler.state_dict(), {"step": 3, "total_tokens": 0, "total_samples": 0}
    app = {"model": model, "optimizers": optimizer, "scheduler": scheduler, "progress": progress}
    dcp.save({"app": app}, checkpoint_id=path)


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"global_step": 6}, "AdamW's step = 5.*trainer_state.json: global_step = 6"),
            (
                {"micro_step": 3, "gradient_accumulation_steps": 4},
                "middle of gradient accumulation .micro_step = 3: micro-batch 3 of 4",
            ),
            ({"accumulation_step": 1}, "middle of gradient accumulation"),
            ({"global_step": "5"}, "global_step is '5', no count"),
        ],
    )
    def test_states_from_the_middle_of_a_cycle(self, change, message, tmp_path):
        source = ForeignRun().train(5).save_hf_trainer(tmp_path / "source", **change)
        with pytest.raises(CheckpointError, match=f"(?s){message}"):
            brought_in(source, tmp_path / "in")
        assert not (tmp_path / "in").exists()

    def test_dcp_states_from_the_middle_of_a_cycle(self, tmp_path):
        run = ForeignRun(groups=one_group, schedule=linear_lr).train(4)
        sources = (run.save_prime_rl(tmp_path / "a", micro_step=3), run.save_torchtitan(tmp_path / "b", micro_step=3))
        for source in sources:
            with pytest.raises(CheckpointError, match="middle of gradient accumulation .*micro_step = 3"):
                brought_in(source, tmp_path / "in")
        assert not (tmp_path / "in").exists()

    def test_a_full_cycle_is_none(self, tmp_path):
        source = ForeignRun().train(5).save_hf_trainer(tmp_path / "source", micro_step=8, gradient_accumulation_steps=4)
        assert brought_in(source, tmp_path / "in").step == 5

    def test_the_user_may_know_better(self, tmp_path):
        source = ForeignRun().train(5).save_hf_trainer(tmp_path / "source", global_step=6)
        assert brought_in(source, tmp_path / "in", step=5).step == 5

    def test_another_architecture(self, tmp_path):
        """rope_theta has no tensor: shapes alone would not tell."""
        source = ForeignRun().train(1).save_hf_trainer(tmp_path / "source")
        text = json.loads((source / "config.json").read_text())
        text["rope_parameters"]["rope_theta"] = 5e5
        (source / "config.json").write_text(json.dumps(text))
        with pytest.raises(CheckpointMismatch, match="rope"):
            brought_in(source, tmp_path / "in")

    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            (["exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"], "amsgrad"),
            (["momentum_buffer"], "has exp_avg, exp_avg_sq and step"),
            (["state1", "qmap1", "step"], "8-bit"),
        ],
    )
    def test_other_optimizers(self, entries, message, tmp_path):
        source = ForeignRun().train(1).save_hf_trainer(tmp_path / "source")
        saved = torch.load(source / "optimizer.pt", weights_only=True)
        saved["state"] = {number: dict.fromkeys(entries, torch.ones(())) for number in saved["state"]}
        torch.save(saved, source / "optimizer.pt")
        with pytest.raises(CheckpointError, match=message):
            brought_in(source, tmp_path / "in")

    def test_weights_alone_need_a_word(self, tmp_path):
        run = ForeignRun()
        run.model.save_pretrained(tmp_path / "weights")
        with pytest.raises(CheckpointError, match=r"no optimizer state.*--model.name.*--fresh-optimizer"):
            brought_in(tmp_path / "weights", tmp_path / "in")
        done = brought_in(tmp_path / "weights", tmp_path / "in", fresh_optimizer=True)
        assert done.step == 0 and "weights only: step 0, new optimizer state" in done.notes[0]
        runs.sft(tmp_path / "run", *COSINE, "--resume.dir", str(tmp_path / "in"), "--stop-step", "2")
        flags = ["--model.name", str(with_tokenizer(tmp_path / "weights")), "--no-model.random-init"]
        runs.sft(tmp_path / "other", *COSINE, *flags, "--stop-step", "2")
        assert runs.differences(runs.checkpoint(tmp_path / "run", 2), runs.checkpoint(tmp_path / "other", 2)) == ""

    def test_what_the_command_line_gets_wrong(self, tmp_path, capsys):
        assert main(["import", "only-one"]) == 2
        assert "SRC and OUT first" in capsys.readouterr().err
        assert main(["import", str(tmp_path), str(tmp_path / "out"), *runs.DEBUG]) == 2
        assert "nothing in it is known" in capsys.readouterr().err
        assert main(["import", "--help"]) == 0

    def test_an_existing_step_is_never_replaced(self, tmp_path):
        source = ForeignRun().train(2).save_hf_trainer(tmp_path / "source")
        brought_in(source, tmp_path / "in")
        with pytest.raises(CheckpointError, match="exists"):
            brought_in(source, tmp_path / "in")

    def test_missing_files(self, tmp_path):
        source = ForeignRun().train(2).save_hf_trainer(tmp_path / "source")
        (source / "model.safetensors").unlink()
        with pytest.raises(ModelError, match="model.safetensors"):
            brought_in(source, tmp_path / "in")
        (source / "optimizer.pt").unlink()
        with pytest.raises(CheckpointError, match="without its optimizer.pt|no optimizer state"):
            brought_in(source, tmp_path / "in")


def with_tokenizer(path: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(foreign.TINY / name, path / name)
    return path


@pytest.mark.slow
def test_a_state_of_the_real_accelerate(tmp_path):
    """`Accelerator.save_state` as it is, of a model with a tied output weight."""
    accelerate = pytest.importorskip("accelerate")

    run = ForeignRun()
    accelerator = accelerate.Accelerator(cpu=True)
    model, run.optimizer, run.scheduler = accelerator.prepare(run.model, run.optimizer, run.scheduler)
    assert model is run.model
    run.train(4)
    accelerator.save_state(str(tmp_path / "state"))
    run.optimizer = run.optimizer.optimizer
    done = brought_in(tmp_path / "state", tmp_path / "in")
    assert (done.kind, done.step) == ("Accelerate", 4)
    holds(done.path, run)
    assert verify(done.path).sound


@pytest.mark.slow
def test_a_checkpoint_of_the_real_trainer(tmp_path):
    """The layout above is the real one: transformers.Trainer writes it, and it comes in."""
    pytest.importorskip("accelerate")
    from torch.utils.data import Dataset

    class Tokens(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            ids = torch.randint(0, 384, (16,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": ids, "labels": ids}

    model = foreign.hf_model()
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"),
        max_steps=10,
        save_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        weight_decay=0.1,
        lr_scheduler_type="cosine",
        warmup_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Tokens())
    trainer.train()
    for step in (5, 10):
        done = brought_in(tmp_path / f"hf/checkpoint-{step}", tmp_path / f"in{step}")
        assert (done.kind, done.step) == ("Hugging Face Trainer", step)
        assert verify(done.path).sound
    run = ForeignRun.__new__(ForeignRun)
    run.model, run.optimizer = model, trainer.optimizer.optimizer
    holds(tmp_path / "in10/checkpoints/step_00000010", run)
