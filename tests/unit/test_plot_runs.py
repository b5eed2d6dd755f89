"""`trainer plot`: from the files of real runs to a PNG."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.cli.plot import main
from trainer.config.run import RunConfig
from trainer.errors import ConfigError, DataError
from trainer.train.metrics import MetricsLog
from trainer.train.plots import load_run, plot_runs

PNG = b"\x89PNG\r\n\x1a\n"


def train(run_dir: Path, start_step: int, end_step: int, *, bad_steps: tuple[int, ...] = ()) -> None:
    config = RunConfig.model_validate({"log": {"progress": "off"}})
    with MetricsLog(run_dir, config, is_main=True, start_step=start_step, max_steps=20, run_id="id") as log:
        if start_step == 0:
            log.log({"step": 0, "val_loss": 3.0, "val_tokens": 10})
        for step in range(start_step + 1, end_step + 1):
            loss = math.nan if step in bad_steps else 2 + 1 / step
            row = {"step": step, "loss": loss, "lr": 1e-4 / step, "grad_norm": 1.0 + 1 / step, "tokens_per_second": 9e3}
            log.log(row | ({"val_loss": 2.1 + 1 / step} if step % 5 == 0 else {}))


def pixels(path: Path) -> bytes:
    """The picture's pixels; two pictures are compared by them, since a PNG also names the software."""
    import matplotlib.image

    assert path.read_bytes().startswith(PNG)
    return matplotlib.image.imread(path).tobytes()


@pytest.fixture
def resumed(tmp_path: Path) -> Path:
    """Trained to 13, resumed at 10, trained to 20."""
    train(tmp_path / "resumed", 0, 13)
    train(tmp_path / "resumed", 10, 20)
    return tmp_path / "resumed"


def test_what_a_resumed_run_says(resumed: Path) -> None:
    history = load_run(resumed)
    assert history.label == "resumed"
    assert [row["step"] for row in history.rows] == list(range(21))
    assert history.resumed_at == [10]
    assert {generation: [row["step"] for row in rows] for generation, rows in history.superseded.items()} == {
        0: [11, 12, 13]
    }


def test_a_resume_that_was_taken_back_is_not_marked(resumed: Path) -> None:
    train(resumed, 15, 17)
    train(resumed, 5, 20)
    assert load_run(resumed).resumed_at == [5]
    train(resumed, 10, 12)
    assert load_run(resumed).resumed_at == [5, 10]
    train(resumed, 0, 3)
    assert load_run(resumed).resumed_at == []


def test_one_run_goes_to_its_plots_directory(resumed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(resumed)]) == 0
    out = resumed / "plots" / "metrics.png"
    assert capsys.readouterr().out.strip() == str(out)
    assert len(set(pixels(out))) > 16  # something is drawn


def test_what_is_drawn_unless_keys_are_named(resumed: Path, tmp_path: Path) -> None:
    assert main([str(resumed), "-o", str(tmp_path / "all.png")]) == 0
    main([str(resumed), "-o", str(tmp_path / "named.png"), "--keys", "loss,lr,grad_norm,tokens_per_second"])
    assert pixels(tmp_path / "all.png") == pixels(tmp_path / "named.png")


def test_two_runs_where_the_second_lies_on_the_first_are_both_seen(resumed: Path, tmp_path: Path) -> None:
    train(tmp_path / "straight", 0, 20)
    runs = [tmp_path / "straight", resumed]
    assert main([*map(str, runs), "-o", str(tmp_path / "both.png"), "--labels", "a,b", "--title", "Twins"]) == 0
    plot_runs(runs[:1], tmp_path / "first.png", labels=["a"], title="Twins")
    plot_runs(runs[1:], tmp_path / "second.png", labels=["b"], title="Twins")
    both = pixels(tmp_path / "both.png")
    assert both not in (pixels(tmp_path / "first.png"), pixels(tmp_path / "second.png"))


def test_keys_choose_the_panels_and_superseded_adds_rows(resumed: Path, tmp_path: Path) -> None:
    drawn = {}
    for name, options in {"all": [], "keys": ["--keys", "grad_norm,lr"], "old": ["--superseded"]}.items():
        out = tmp_path / f"{name}.png"
        assert main([str(resumed), "-o", str(out), *options]) == 0
        drawn[name] = pixels(out)
    assert len(set(drawn.values())) == 3


def test_steps_that_are_not_finite_are_marked(tmp_path: Path) -> None:
    train(tmp_path / "good", 0, 20)
    train(tmp_path / "bad", 0, 20, bad_steps=(7, 8))
    good = plot_runs([str(tmp_path / "good")], str(tmp_path / "good.png"), keys=["loss"], labels=["x"])
    bad = plot_runs([tmp_path / "bad"], tmp_path / "bad.png", keys=["loss"], labels=["x"])
    assert _reddish(bad) > 20 > _reddish(good)


def _reddish(path: Path) -> int:
    """Pixels in the colour of the crosses."""
    import matplotlib.image

    image = matplotlib.image.imread(path)
    return int(((image[..., 0] > 0.6) & (image[..., 1] < 0.15) & (image[..., 2] < 0.25)).sum())


def test_a_run_that_only_validated_can_be_drawn(tmp_path: Path) -> None:
    train(tmp_path / "run", 0, 0)
    assert main([str(tmp_path / "run")]) == 0


def test_a_running_run_with_a_torn_last_line_can_be_drawn(tmp_path: Path) -> None:
    train(tmp_path / "run", 0, 5)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    assert main([str(tmp_path / "run")]) == 0


def test_errors_say_what_to_do(resumed: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere is not a directory; give the directory of a run"):
        main([str(tmp_path / "nowhere")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty has no metrics\.jsonl; give the directory of a run"):
        main([str(tmp_path / "empty")])
    (tmp_path / "empty" / "metrics.jsonl").touch()
    with pytest.raises(DataError, match="has no rows yet"):
        main([str(tmp_path / "empty")])
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"epoch": 1, "loss": 2.0}\n')
    with pytest.raises(DataError, match="has rows without a step: no run of this trainer"):
        main([str(tmp_path / "empty")])
    with pytest.raises(DataError, match=r"no run has the metric 'los'; there are: grad_norm, loss, lr"):
        main([str(resumed), "--keys", "los"])
    with pytest.raises(ConfigError, match="must end in .png"):
        main([str(resumed), "-o", str(tmp_path / "x.pdf")])
    with pytest.raises(ConfigError, match="--labels has 2 names for 1 runs"):
        main([str(resumed), "--labels", "a,b"])
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write the picture"):
        main([str(resumed), "-o", str(tmp_path / "file" / "x.png")])


def test_plot_never_imports_torch_and_matplotlib_only_to_draw(resumed: Path) -> None:
    code = (
        "import sys\n"
        "from trainer.cli.plot import build_parser, main\n"
        "import trainer.train.plots\n"
        "build_parser().format_help()\n"
        "assert 'matplotlib' not in sys.modules\n"
        f"main([{str(resumed)!r}])\n"
        "assert 'matplotlib' in sys.modules\n"
        "assert not {'torch', 'transformers', 'wandb', 'rich'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
