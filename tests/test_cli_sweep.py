"""`lightning-3d train -m`: a run for each combination, each in a folder of its own, whatever becomes of the others."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_3d.cli import main, run_folder, sweep
from lightning_3d.cli.job import Job
from lightning_3d.strategies.processes.launch import Outcome

DIGITS = ["recipe=digits_mlp", "logger=none", "layout=single"]


class Started:
    """Stands for `start`: notes each job, and ends it as told by its learning rate."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.outcome: dict[float, Outcome | dict[str, float]] = {}

    def __call__(self, job: Job) -> Outcome:
        self.jobs.append(job)
        run_folder.write_config(job.folder, job.config, recipe=job.recipe, overrides=job.overrides)
        rate = job.config["model"]["learning_rate"]
        outcome = self.outcome.get(rate, {"val_loss": rate})
        if isinstance(outcome, Outcome):
            return outcome
        run_folder.write_result(job.folder, global_step=1, metrics=outcome)
        return Outcome(0)

    @property
    def rates(self) -> list[float]:
        return [job.config["model"]["learning_rate"] for job in self.jobs]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    monkeypatch.chdir(tmp_path)
    started = Started()
    monkeypatch.setattr(sweep, "start", started)
    return started


def train(*arguments: str) -> int:
    return main(["train", "-m", *DIGITS, *arguments])


def test_every_combination_is_one_job_with_one_folder(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("model.learning_rate=0.1,0.2", "seed=1,2", "data.num_workers=0") == 0
    assert [(job.config["model"]["learning_rate"], job.config["seed"]) for job in started.jobs] == [
        (0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2)
    ]  # fmt: skip
    (folder,) = Path("runs").iterdir()
    assert [job.folder for job in started.jobs] == [folder / str(number) for number in range(4)]
    assert sorted(path.parent.name for path in folder.glob("*/config.yaml")) == ["0", "1", "2", "3"]
    table = capsys.readouterr().out
    assert "model.learning_rate=0.2 seed=1" in table and str(folder / "2") in table


def test_values_with_equals_signs_spaces_and_commas_reach_the_job_whole(started: Started) -> None:
    assert (
        train("model.learning_rate=0.1", r"callbacks.checkpoint.filename='a=b c','d, e'", "output_dir='my runs'") == 0
    )
    assert [job.config["callbacks"]["checkpoint"]["filename"] for job in started.jobs] == ["a=b c", "d, e"]
    assert all(job.folder.parent.parent == Path("my runs") for job in started.jobs)


def test_a_reference_in_a_value_is_to_the_job_s_own_settings(started: Started) -> None:
    assert train("name=mine", "seed=3,4", "callbacks.checkpoint.filename='${name}-${seed}',x") == 0
    names = [job.config["callbacks"]["checkpoint"]["filename"] for job in started.jobs]
    assert names == ["mine-3", "x", "mine-4", "x"]


def test_groups_layouts_and_deletions_can_be_part_of_a_sweep(started: Started) -> None:
    assert (
        main(["train", "-m", "recipe=digits_mlp", "logger=none,csv", "layout=dp2,zero3x2", "~callbacks.progress"]) == 0
    )
    assert [job.layout.name for job in started.jobs if job.layout] == ["dp2", "zero3x2"] * 2
    assert all("progress" not in job.config["callbacks"] for job in started.jobs)


@pytest.mark.parametrize("batches", [[], ["hydra.sweeper.max_batch_size=1"]], ids=["one batch", "batches"])
def test_failed_job_does_not_end_the_sweep_and_is_told_at_its_end(
    started: Started, batches: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    started.outcome = {0.1: Outcome(1), 0.2: {"val_loss": float("nan")}}
    assert train("model.learning_rate=0.1,0.2,0.3", *batches) == 1
    assert started.rates == [0.1, 0.2, 0.3]
    told = capsys.readouterr()
    assert "job 0: exit code 1" in told.out and "job 1: val_loss=nan" in told.out and "0.3" in told.out
    assert told.err.splitlines() == ["job 0: exit code 1, see above", "job 1: val_loss=nan"]


@pytest.mark.parametrize("sweeper", ["basic", "optuna"])
def test_sweeper_gets_the_metric_that_was_asked_for(started: Started, sweeper: str, monkeypatch: Any) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    returned = []
    take = sweep._Jobs.__call__
    monkeypatch.setattr(sweep._Jobs, "__call__", lambda jobs, cfg: returned.append(take(jobs, cfg)) or returned[-1])
    started.outcome = {0.1: {"val_loss": 9.0, "val_accuracy": 0.5}, 0.2: {"val_loss": 8.0, "val_accuracy": 0.25}}
    assert (
        train("model.learning_rate=0.1,0.2", "metric=val_accuracy", f"hydra/sweeper={sweeper}", *_trials(sweeper)) == 0
    )
    assert sorted(returned) == [0.25, 0.5]


def _trials(sweeper: str) -> list[str]:
    # A grid, so that both sweepers do the same.
    return ["hydra/sweeper/sampler=grid"] if sweeper == "optuna" else []


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_optuna_goes_on_after_a_failed_trial_and_names_the_best(
    started: Started, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    # A grid's order is random: the one that fails is told by its turn.
    monkeypatch.setattr(sweep, "start", lambda job: started(job) and Outcome(int(len(started.jobs) == failing + 1)))
    search = "model.learning_rate=0.1,0.2,0.3"
    assert train(search, "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra.sweep.dir=here") == 1
    assert sorted(started.rates) == [0.1, 0.2, 0.3]
    best = min(rate for turn, rate in enumerate(started.rates) if turn != failing)
    assert yaml.safe_load(Path("here/optimization_results.yaml").read_text())["best_value"] == best


def test_result_of_any_number_is_json_and_read_as_it_was(tmp_path: Path) -> None:
    metrics = {"val_loss": float("nan"), "high": float("inf"), "low": float("-inf"), "accuracy": 0.5}
    run_folder.write_result(tmp_path, global_step=3, metrics=metrics)

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    json.loads((tmp_path / "result.json").read_text(), parse_constant=refuse)
    assert str(run_folder.read_result(tmp_path)) == str({"global_step": 3, "metrics": metrics})


def test_optuna_searches_an_interval(started: Started) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    options = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.sampler.seed=1"]
    assert train("model.learning_rate=tag(log, interval(1e-4, 1e-1))", *options) == 0
    assert len(set(started.rates)) == 4 and all(1e-4 <= rate <= 1e-1 for rate in started.rates)


def test_sweep_in_which_every_trial_fails_says_why_and_nothing_else(started: Started, capsys: Any) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    started.outcome = {0.1: Outcome(1), 0.2: Outcome(137)}
    assert train("model.learning_rate=0.1,0.2", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid") == 1
    told = capsys.readouterr()
    assert "exit code 137" in told.out and "Traceback" not in told.err


@pytest.mark.parametrize("sweeper", ["basic", "optuna"])
def test_job_that_the_machine_lets_down_says_why_and_does_not_end_the_sweep(
    started: Started, sweeper: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")

    def full(job: Job) -> Outcome:
        if job.folder.name != "1":
            raise OSError(errno.ENOSPC, "No space left on device")
        return started(job)

    monkeypatch.setattr(sweep, "start", full)
    assert train("model.learning_rate=0.1,0.2,0.3", f"hydra/sweeper={sweeper}", *_trials(sweeper)) == 1
    assert len(started.jobs) == 1
    table = capsys.readouterr().out
    assert all(f"job {job}: OSError: [Errno 28] No space left on device" in table for job in (0, 2))


def test_job_that_leaves_no_result_says_so(started: Started, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sweep, "start", lambda job: Outcome(0))
    assert train("seed=1,2") == 1
    table = capsys.readouterr().out
    assert table.count("FileNotFoundError") == 2 and "result.json" in table


def test_misspelt_metric_ends_the_sweep_at_the_first_job_and_says_what_there_is(started: Started, capsys: Any) -> None:
    assert train("model.learning_rate=0.1,0.2,0.3", "metric=val_los") == 1
    assert started.rates == [0.1]
    assert "logged no metric=val_los. Did you mean val_loss?" in capsys.readouterr().err


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM])
def test_signal_that_stops_a_job_stops_the_sweep(started: Started, sig: signal.Signals, capsys: Any) -> None:
    started.outcome = {0.2: Outcome(128 + sig, stopped=True)}
    assert train("model.learning_rate=0.1,0.2,0.3") == 128 + sig
    assert started.rates == [0.1, 0.2]
    table = capsys.readouterr().out
    assert "job 1: stopped" in table and "failed" not in table


def test_ctrl_c_before_a_job_has_ranks_stops_the_sweep(started: Started, monkeypatch: Any, capsys: Any) -> None:
    def interrupted(job: Job) -> Outcome:
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "start", interrupted)
    assert train("model.learning_rate=0.1,0.2") == 128 + signal.SIGINT
    table = capsys.readouterr().out
    assert "job 0: stopped" in table and "failed" not in table and "job 1" not in table


def test_rank_that_something_else_ends_by_a_signal_fails_its_job_alone(started: Started, capsys: Any) -> None:
    started.outcome = {0.2: Outcome(128 + signal.SIGTERM)}
    assert train("model.learning_rate=0.1,0.2,0.3") == 1
    assert started.rates == [0.1, 0.2, 0.3]
    assert "job 1: exit code 143, see above" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.learning_rate=0.1,-1"], "learning_rate=-1"),
        (["layout=dp2,dp3"], "global_batch_size=64 does not divide by the data-parallel size 3"),
        (["model.learning_rat=0.1,0.2"], "Did you mean model.learning_rate?"),
        (["model=digits_mlp,digits_mpl"], "Did you mean digits_mlp?"),
        (["model.learning_rate=interval(0.1,0.2)"], "add hydra/sweeper=optuna"),
        (["seed=1,2", "run_dir=here"], "hydra.sweep.dir=FOLDER"),
        (["seed=1,2", "resume=auto"], "begins anew"),
        (["output_dir=a,b"], "Give output_dir one value"),
        (["recipe=digits_mlp,stdlib_gpt"], "a sweep has one recipe"),
        (["seed=1,2", "hydra/launcher=joblib"], "of Hydra's own settings a sweep has"),
        (["seed=1,2", "hydra/sweeper=optima"], "optima"),
        (["seed=1,2", "hydra.sweeper.trials=3"], "trials"),
        (["seed=1,2", "--print-config"], "--print-config shows one run"),
        (["seed=1,2", "metric=5"], "metric=5 is not text"),
        (["seed=1,2", "metric="], "metric='' is no metric's name"),
        (["seed=1,2", "hydra.sweep.dir=s3://bucket/sweep"], "hydra.sweep.dir=s3://bucket/sweep, but run folders are"),
        (["seed=1,2", "hydra.sweep.dir="], "hydra.sweep.dir='' is no folder"),
        (["seed=1,2", "hydra.sweep.dir=null"], "hydra.sweep.dir=null"),
        (["seed=1,2", "hydra.sweep.dir=/dev/null/here"], "hydra.sweep.dir=/dev/null/here: /dev/null is a file"),
        (["seed=1,2", "hydra.sweep.dir=here", "hydra.sweep.dir=there"], "set hydra.sweep.dir twice"),
        (["seed=1,2", "seed=3,4"], "set seed twice"),
        (["recipe=stdlib_gpt", "recipe=digits_mlp", "seed=1,2"], "set recipe twice"),
    ],
)  # fmt: skip
def test_mistake_is_told_in_one_line_before_the_first_job(
    started: Started, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    others = ["recipe=digits_mlp", "layout=single"]
    kept = [other for other in others if not arguments[0].startswith(other.split("=")[0] + "=")]
    assert main(["train", "-m", "logger=none", *kept, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert started.jobs == [] and list(tmp_path.iterdir()) == []


def test_folder_of_an_earlier_sweep_is_not_written_over(started: Started, capsys: Any) -> None:
    assert train("seed=1,2", "hydra.sweep.dir=here") == 0
    assert train("seed=3,4", "hydra.sweep.dir=here") == 2
    assert "Name another" in capsys.readouterr().err
    assert len(started.jobs) == 2


def test_sweep_under_torchrun_is_refused(started: Started, monkeypatch: Any, capsys: Any) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert train("seed=1,2") == 2
    assert "without torchrun" in capsys.readouterr().err
    assert started.jobs == []


def test_several_values_without_the_option_say_how_to_sweep(capsys: Any) -> None:
    assert main(["train", *DIGITS, "seed=1,2"]) == 2
    assert "for a run of each value add -m" in capsys.readouterr().err


MODEL = """
import json, os, sys
from pathlib import Path
from lightning_3d.models.digits import DigitsMLP

class Noting(DigitsMLP):
    def __init__(self, note: str = "", **settings):
        super().__init__(**settings)
        self.note = note

    def on_train_start(self):
        if self.note == "fails" and self.trainer.global_rank == 1:
            raise ValueError("not today")
        weight = sum(parameter.double().sum().item() for parameter in self.parameters())
        seen = {"note": self.note, "weight": weight, "argv": sys.argv[1:]}
        with open(os.path.join(self.trainer.default_root_dir, f"seen-{self.trainer.global_rank}.json"), "w") as file:
            json.dump(seen, file)
"""


@pytest.mark.distributed
def test_two_ranks_per_job_have_one_config_one_folder_and_one_wandb_run_and_never_sweep(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    done = _sweep(
        tmp_path,
        "model.note=fails,'a=b c'",
        "layout=dp2",
        "trainer.max_steps=4",
        "trainer.val_check_interval=2",
        "callbacks.checkpoint.dirpath='${run_dir}/my checkpoints'",
        "callbacks.checkpoint.every_n_train_steps=2",
        "hydra.sweep.dir=sweep",
    )
    assert done.returncode == 1, done.stderr
    assert "rank 1 of 2 raised ValueError: not today" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["mine.py", "sweep"]
    assert sorted(path.parent.name for path in (tmp_path / "sweep").glob("*/config.yaml")) == ["0", "1"]
    folders = [tmp_path / "sweep" / number for number in "01"]
    for folder in folders:
        assert len(list((folder / "wandb").glob("offline-run-*/*.wandb"))) == 1
    assert len({(folder / "wandb_run_id").read_text() for folder in folders}) == 2
    ranks = [json.loads((folders[1] / f"seen-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1] and ranks[0]["note"] == "a=b c"
    assert ranks[0]["argv"] == [str(folders[1] / "config.yaml")]
    assert any((folders[1] / "my checkpoints").iterdir())
    assert run_folder.read_result(folders[1])["metrics"]["val_loss"] > 0
    assert "job 0: exit code 1" in done.stdout


@pytest.mark.distributed
@pytest.mark.slow
def test_optuna_searches_with_real_ranks_over_a_trial_that_fails(tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    (tmp_path / "mine.py").write_text(MODEL)
    done = _sweep(
        tmp_path,
        "model.note=fails,a,b",
        "hydra/sweeper=optuna",
        "hydra/sweeper/sampler=grid",
        "hydra.sweep.dir=sweep",
        "layout=dp2",
        "trainer.max_steps=2",
        "trainer.val_check_interval=2",
    )
    assert done.returncode == 1, done.stderr
    folders = {read["model"]["note"]: path.parent for path in (tmp_path / "sweep").glob("*/config.yaml")
               if (read := yaml.safe_load(path.read_text()))}  # fmt: skip
    assert sorted(folders) == ["a", "b", "fails"] and not (folders["fails"] / "result.json").exists()
    for note in "ab":
        assert len({(folders[note] / f"seen-{rank}.json").read_text() for rank in range(2)}) == 1
    best = yaml.safe_load((tmp_path / "sweep" / "optimization_results.yaml").read_text())["best_value"]
    assert best == min(run_folder.read_result(folders[note])["metrics"]["val_loss"] for note in "ab")
    assert len({(folder / "wandb_run_id").read_text() for folder in folders.values()}) == 3


@pytest.mark.distributed
@pytest.mark.slow
def test_ctrl_c_ends_the_sweep_and_every_rank(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*_COMMAND, "recipe=digits_mlp", "layout=dp2", "seed=1,2", "trainer.max_steps=-1", "logger=none", *_QUIET,
         "callbacks.checkpoint.every_n_train_steps=5"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("runs/*/0/checkpoints/*.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, output
    assert "job 0: stopped" in output and "job 1" not in output
    assert not [pid for pid in Path("/proc").iterdir() if pid.name.isdigit() and _is_in(pid, tmp_path)]


_COMMAND = [sys.executable, "-m", "lightning_3d", "train", "-m"]
_QUIET = ["trainer.enable_progress_bar=false", "trainer.enable_model_summary=false"]


def _sweep(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*_COMMAND, "recipe=digits_mlp", "model._target_=mine.Noting", *_QUIET, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def _is_in(process: Path, folder: Path) -> bool:
    try:
        return os.readlink(process / "cwd") == str(folder)
    except OSError:
        return False
