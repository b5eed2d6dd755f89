"""AppState: what goes into a checkpoint, what is checked before a load, and that a load really took."""

import math

import pytest
import torch

from support.checkpoints import Run, Table, whole
from trainer.checkpoint.app_state import AppState
from trainer.checkpoint.leaves import load_leaves
from trainer.checkpoint.storage import save_tensors
from trainer.errors import CheckpointError, CheckpointMismatch


def owners() -> dict[str, Table]:
    return {
        "model": Table(**{"layers.0.weight": torch.randn(4, 3), "norm": torch.randn(3).bfloat16()}),
        "optimizer": Table(
            state={"layers.0.weight": {"exp_avg": torch.randn(4, 3), "step": torch.tensor(3.0)}, "norm": {}},
            groups=[{"lr": 0.007500000025, "betas": (0.9, 0.95), "names": ["layers.0.weight"], "fused": None}],
        ),
        "data": Table(cursor={"epoch": 1, "row": 10**20, "seen": [1, 2]}, ratio=math.inf),
    }


def saved(tmp_path, app: AppState):
    save_tensors(tmp_path, app.state_dict())
    return tmp_path


def blank(entries):
    """The same structure with other values."""
    if isinstance(entries, torch.Tensor):
        return torch.zeros_like(entries)
    if isinstance(entries, dict):
        return {key: blank(value) for key, value in entries.items()}
    return None


def fresh() -> dict[str, Table]:
    return {name: Table(**blank(owner.entries)) for name, owner in owners().items()}


def test_state_dict_is_flat_live_and_pure():
    torch.manual_seed(0)
    table = owners()
    app = AppState(**table)
    before = whole(app.state_dict())
    state = app.state_dict()
    assert set(state) == {
        "model.layers.0.weight",
        "model.norm",
        "optimizer.state.layers.0.weight.exp_avg",
        "optimizer.state.layers.0.weight.step",
        "json",
    }
    assert state["model.norm"] is table["model"].entries["norm"]
    assert state["json"].dtype == torch.uint8
    document = load_leaves(state["json"].numpy().tobytes(), "here")
    assert document["optimizer"]["groups"] == table["optimizer"].entries["groups"]
    assert document["optimizer"]["state"] == {"norm": {}}  # only what is no tensor
    assert document["model"] == {}
    assert whole(app.state_dict()) == before


def test_a_load_restores_tensors_in_place_and_leaves_with_their_types(tmp_path):
    torch.manual_seed(0)
    source = AppState(**owners())
    target_owners = fresh()
    target = AppState(**target_owners)
    weight = target_owners["model"].entries["layers.0.weight"]
    target.load(saved(tmp_path, source))
    assert target_owners["model"].entries["layers.0.weight"] is weight
    assert whole(target.state_dict()) == whole(source.state_dict())
    assert repr(target.leaves()) == repr(source.leaves())
    assert type(target.leaves()["optimizer"]["groups"][0]["betas"]) is tuple


@pytest.mark.parametrize(
    ("entries", "match"),
    [
        ({"moments": [torch.ones(2)]}, r"'o\.moments' is a list with tensors"),
        ({"deep": [{"lr": torch.ones(2)}]}, r"'o\.deep\[0\]\.lr'"),
        ({"state": {0: torch.ones(2)}}, r"'o\.state' has the key 0"),
        ({"lr": torch.ones(2).numpy()[0]}, r"'o\.lr' is a numpy\.float32"),
        ({"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}, r"flat name 'o\.a\.b'"),
        ({"w": torch.empty(2, device="meta")}, r"'o\.w' is on the meta device"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, r"'o\.w' has dtype torch\.complex64"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_by_name(entries, match):
    with pytest.raises(CheckpointError, match=match):
        AppState(o=Table(**entries)).state_dict()


def test_everything_that_does_not_fit_is_named_before_anything_is_loaded(tmp_path):
    torch.manual_seed(0)
    directory = saved(tmp_path, AppState(**owners()))
    target_owners = fresh()
    model, optimizer = target_owners["model"].entries, target_owners["optimizer"].entries
    model["norm"] = torch.zeros(3)  # bfloat16 in the checkpoint
    model["extra"] = torch.zeros(1)
    optimizer["state"]["layers.0.weight"]["exp_avg"] = torch.zeros(3, 4)
    del optimizer["state"]["layers.0.weight"]["step"]
    del target_owners["data"]
    target_owners["rng"] = Table(seed=1)
    target = AppState(**target_owners)
    before = whole(target.state_dict())
    with pytest.raises(CheckpointMismatch, match="nothing was loaded") as failure:
        target.load(directory)
    text = str(failure.value)
    assert "model.norm: checkpoint BF16 [3], this run F32 [3]" in text
    assert "model.extra: this run has it, the checkpoint does not" in text
    assert "optimizer.state.layers.0.weight.exp_avg: checkpoint F32 [4, 3], this run F32 [3, 4]" in text
    assert "optimizer.state.layers.0.weight.step: the checkpoint has it, nothing in this run takes it" in text
    assert "data: the checkpoint has this owner, this run does not" in text
    assert "rng: this run has this owner, the checkpoint does not" in text
    assert whole(target.state_dict()) == before


def test_owners_can_be_skipped(tmp_path):
    torch.manual_seed(0)
    directory = saved(tmp_path, AppState(**owners()))
    target_owners = fresh()
    target = AppState(**target_owners)
    target.load(directory, skip={"optimizer", "data"})
    assert target_owners["model"].entries["norm"].any()
    assert not target_owners["optimizer"].entries["state"]["layers.0.weight"]["exp_avg"].any()
    assert target_owners["data"].entries["cursor"] == {"epoch": None, "row": None, "seen": None}
    with pytest.raises(CheckpointError, match="asked to skip datta"):
        target.load(directory, skip={"datta"})


@pytest.mark.parametrize("owner", ["optimizer", "data"])
def test_an_owner_that_drops_its_entries_is_found_out(tmp_path, owner):
    directory = saved(tmp_path, AppState(**owners()))
    target_owners = fresh()
    target_owners[owner].load_state_dict = lambda state: None
    with pytest.raises(CheckpointMismatch, match=rf"not the checkpoint's after loading:\n  {owner}\."):
        AppState(**target_owners).load(directory)


def test_an_owner_that_keeps_other_tensors_than_the_loaded_ones_is_found_out(tmp_path):
    """A model that goes on with its old weights: state_dict gave copies, and load_state_dict did not copy them back."""
    torch.manual_seed(0)
    directory = saved(tmp_path, AppState(**owners()))
    target_owners = fresh()
    live = target_owners["model"].entries
    target_owners["model"].state_dict = lambda: {name: tensor.clone() for name, tensor in live.items()}
    target_owners["model"].load_state_dict = lambda state: None
    with pytest.raises(CheckpointMismatch, match=r"model\.layers\.0\.weight: its live tensor does not hold"):
        AppState(**target_owners).load(directory)

    def copy_back(state):
        for name, tensor in state.items():
            live[name].copy_(tensor)

    target_owners["model"].load_state_dict = copy_back
    AppState(**target_owners).load(directory)


def test_run_local_entries_are_the_owners_to_name(tmp_path):
    directory = saved(tmp_path, AppState(**owners()))

    class KeepsFused(Table):
        verify_ignore = frozenset({"fused"})

        def load_state_dict(self, state):
            super().load_state_dict({**state, "groups": [{**group, "fused": True} for group in state["groups"]]})

    target_owners = fresh()
    target_owners["optimizer"] = KeepsFused(**target_owners["optimizer"].entries)
    AppState(**target_owners).load(directory)
    KeepsFused.verify_ignore = frozenset()
    with pytest.raises(CheckpointMismatch, match=r"optimizer\.groups\[0\]\.fused: checkpoint None, after loading True"):
        AppState(**target_owners).load(directory)


def test_an_owner_can_bring_its_own_comparison(tmp_path):
    directory = saved(tmp_path, AppState(**owners()))
    target_owners = fresh()
    seen = []
    target_owners["data"].verify = lambda saved: seen.append(saved) or ["cursor.row: no"]
    with pytest.raises(CheckpointMismatch, match=r"data\.cursor\.row: no"):
        AppState(**target_owners).load(directory)
    assert seen[0]["cursor"]["row"] == 10**20


@pytest.mark.parametrize(("parameter", "moments"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_optimizer_state_keeps_its_dtype_and_bytes(tmp_path, parameter, moments):
    """torch's own load_state_dict would cast moments to the parameter's dtype."""

    def run():
        run = Run(tmp_path)
        run.module.to(parameter)
        for state in run.optimizer.inner.state.values():
            state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].to(moments), state["exp_avg_sq"].to(moments)
        return run

    source = run()
    torch.manual_seed(1)
    for state in source.optimizer.inner.state.values():
        for tensor in state.values():
            tensor.normal_() if tensor.dim() else tensor.fill_(3)
    directory = saved(tmp_path, source.app)
    target = run()
    target.app.load(directory)
    assert whole(target.app.state_dict()) == whole(source.app.state_dict())
    for state in target.optimizer.inner.state.values():
        assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, state["step"].dtype) == (
            moments,
            moments,
            torch.float32,
        )


def test_tensors_of_another_dtype_do_not_fit(tmp_path):
    directory = saved(tmp_path, AppState(o=Table(exp_avg=torch.ones(3).bfloat16())))
    with pytest.raises(CheckpointMismatch, match=r"o\.exp_avg: checkpoint BF16 \[3\], this run F32 \[3\]"):
        AppState(o=Table(exp_avg=torch.ones(3))).load(directory)
