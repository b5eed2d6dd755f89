"""W&B offline under a real run: killed past its checkpoint and resumed, it is one run with one row for each step."""

import json
import os
import signal

import pytest

from support import runs
from support.runs import DEBUG, metrics, read
from trainer.train.sinks.wandb_history import offline_logs, records


@pytest.mark.slow
def test_m1_a_killed_run_keeps_its_id_and_its_series(tmp_path):
    run_dir = tmp_path / "run"
    flags = [*DEBUG, "--output-dir", run_dir, "--wandb.mode", "offline", "--max-steps", "60", "--ckpt.interval", "20"]
    quiet = {"WANDB_X_DISABLE_STATS": "true", "WANDB_SILENT": "true"}
    process = runs.start("sft", *flags, **quiet)
    runs.wait_for_step(run_dir, 30, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert read(run_dir / "metrics.jsonl")[-1]["step"] < 60
    identity = json.loads((run_dir / "run.json").read_text())["run_id"]
    runs.command("sft", *flags, "--resume", **quiet)
    assert json.loads((run_dir / "run.json").read_text())["run_id"] == identity
    assert len({path.parent.name.rpartition("-")[2] for path in (run_dir / "wandb").glob("offline-run-*/*.wandb")}) == 1

    sent = []
    for path in offline_logs(run_dir / "wandb", identity):
        for _, record in records(path):
            if record.HasField("run"):
                assert record.run.run_id == identity
            if record.HasField("history"):
                sent.append({item.nested_key[0]: json.loads(item.value_json) for item in record.history.item})
    rows = metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(61))  # a validation before the first step
    assert [row["_step"] for row in sent] == [row["step"] for row in rows]
    assert [row.get("loss") for row in sent] == [row.get("loss") for row in rows]
