"""What the settings of a run mean: names, layouts, recipes, and mistakes in them told in one line."""

import errno
import math
import os

import pytest
import yaml
from lightning.pytorch.callbacks import Checkpoint

from lightning_3d.cli import main, run_folder, sweep
from lightning_3d.cli.build import build_trainer
from lightning_3d.cli.check import check_layout, check_parts
from lightning_3d.cli.config import groups, recipes
from lightning_3d.cli.job import prepare
from lightning_3d.errors import ConfigError, LayoutError


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_stepz=3", "there is no setting trainer.max_stepz. Did you mean trainer.max_steps?"),
        ("max_steps=3", "Did you mean model.max_steps or trainer.max_steps?"),
        ("model.config.hiden_size=3", "Did you mean hidden_size?"),
        ("stratagy.zero_stage=1", "Did you mean strategy.zero_stage?"),
        ("+trainer.max_stepz=3", "there is no setting trainer.max_stepz"),
        ("+callbacks.mine._target_=nothing.Here", "callbacks.mine._target_='nothing.Here' cannot be imported"),
        ("strategy=zero4", "strategy='zero4' is no option of strategy. Did you mean zero3?"),
        ("recipe=stdlib_gtp", "Did you mean stdlib_gpt?"),
        ("recipe=none.yaml", "there is no such file"),
        ("trainer.max_steps=1,2", "gives several values"),
        ("trainer.max_steps", "write key=value"),
        ("--multi", "there is no option --multi"),
        ("trainer.strategy=ddp", "trainer.strategy is set by the settings under strategy"),
        ("model.config.vocab_size=${data.nothing}", "data.nothing"),
        ("~model.config", "model.config has no value"),
        ("trainer.num_nodes=2", "torchrun"),
        ("layout=zero3x3", "global_batch_size=32 does not divide by the data-parallel size 3"),
        ("trainer.accelerator=gpu", "Set trainer.accelerator=cpu"),
    ],
)
def test_mistake_is_told_in_one_line(override, message, capsys):
    assert main(["train", override]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_layout_and_its_parts_cannot_both_be_given():
    with pytest.raises(ConfigError, match=r"layout=zero3x2 sets strategy.zero_stage already"):
        prepare(["layout=zero3x2", "strategy.zero_stage=1"])


def test_layout_and_another_number_of_devices_do_not_fit(capsys):
    assert main(["train", "layout=zero3x2", "trainer.devices=4"]) == 2
    assert "Set data_parallel_size=4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dp2", {"zero_stage": 0, "data_parallel_size": 2, "data_parallel_replicas": 1}),
        ("zero1x2", {"zero_stage": 1, "data_parallel_size": 2}),
        ("hsdp2x2", {"zero_stage": 3, "data_parallel_size": 4, "data_parallel_replicas": 2}),
        ("single", {"data_parallel_size": 1}),
        ("zero3x2-tp2-pp2", {"data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        ("pp4@gpipe", {"data_parallel_size": 1, "pipeline_parallel_size": 4, "schedule": "gpipe"}),
    ],
)
def test_layout_sets_the_strategy_and_the_number_of_processes(name, sizes):
    _, _, config, _ = prepare([f"layout={name}"])
    assert config["strategy"].items() >= sizes.items()
    axes = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")
    assert config["trainer"]["devices"] == math.prod(sizes.get(axis, 1) for axis in axes)


@pytest.mark.parametrize(("devices", "name"), [(4, "tp2-pp2"), (8, "zero3x2-tp2-pp2"), (16, "zero3x4-tp2-pp2")])
def test_default_recipe_shards_over_more_processes_than_it_splits_over(devices, name):
    _, _, config, _ = prepare([f"trainer.devices={devices}"])
    assert check_layout(config, world_size=devices).name == name


def test_argument_that_the_recipe_does_not_set_can_be_given_all_the_same():
    _, _, config, _ = prepare(["trainer.fast_dev_run=true", "callbacks.checkpoint.verbose=true"])
    assert config["trainer"]["fast_dev_run"] is True
    assert config["callbacks"]["checkpoint"]["verbose"] is True


def test_recipe_that_needs_a_value_says_how_to_write_it(capsys):
    assert main(["train", "recipe=finetune_hf", "--print-config"]) == 2
    assert "write model.path=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", [name for name in recipes() if name != "finetune_hf"])
@pytest.mark.parametrize("option", [f"{group}={one}" for group in ("strategy", "logger") for one in groups()[group]])
def test_every_option_makes_a_config_that_passes(recipe, option, capsys):
    # Four processes suit every option, and enough layers for as many stages.
    layers = ["model.num_hidden_layers=3"] if recipe == "digits_mlp" else []
    assert main(["train", f"recipe={recipe}", option, "trainer.devices=4", *layers, "--print-config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert "${" not in str(config)


def test_recipe_of_ones_own_is_taken_from_a_file(in_empty_folder):
    (in_empty_folder / "mine.yaml").write_text(
        "defaults: [base, strategy: zero1, model: digits_mlp, data: digits, trainer: default, callbacks: default,"
        " logger: none, _self_]\nname: mine\nmodel: {hidden_size: 8}\n"
    )
    recipe, _, config, folder = prepare(["recipe=mine.yaml"])
    assert (recipe, config["model"]["hidden_size"], config["strategy"]["zero_stage"]) == ("mine.yaml", 8, 1)
    assert folder.name.startswith("mine-")


def test_help_names_every_recipe_group_and_option(capsys):
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for name in [*recipes(), *(f"{group}={option}" for group, options in groups().items() for option in options)]:
        assert f"  {name} " in text
    assert main(["--help"]) == 0
    assert "train" in capsys.readouterr().out


def test_unknown_command_is_refused(capsys):
    assert main(["trian"]) == 2
    assert "no command 'trian'" in capsys.readouterr().err


def test_folder_of_a_model_is_found_again_from_any_folder(in_empty_folder, monkeypatch):
    transformers = pytest.importorskip("transformers")
    model = in_empty_folder / "the model's ü"
    transformers.AutoConfig.for_model("llama", num_hidden_layers=1).save_pretrained(model)
    given = ["recipe=finetune_hf", 'model.path="the model\'s ü"', "logger=none", "run_dir=run"]
    recipe, overrides, config, folder = prepare(given)
    assert config["model"]["path"] == config["data"]["tokenizer"] == str(model)
    run_folder.write_config(folder, config, recipe=recipe, overrides=overrides)
    (in_empty_folder / "elsewhere").mkdir()
    monkeypatch.chdir(in_empty_folder / "elsewhere")
    _, _, resumed, _ = prepare([f"run_dir={in_empty_folder}/run", "resume=auto"])
    assert resumed["model"]["path"] == resumed["data"]["tokenizer"] == str(model)


def test_layout_that_cannot_be_is_an_error_of_the_layout():
    with pytest.raises(LayoutError):
        prepare(["layout=dp2-dp2"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layout=dp2", "strategy=zero3"], "layout=dp2 and strategy=zero3 each say how"),
        (["strategy.process_group_backend=nccl", "trainer.accelerator=cpu"], "strategy.process_group_backend='nccl'"),
        (
            ["strategy.replay_every_n_steps=5", "trainer.accumulate_grad_batches=2"],
            "strategy: replay_every_n_steps computes a whole step twice",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(arguments, message, capsys):
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def made_earlier(folder, *overrides):
    """A run of the default recipe that was started with these overrides, and is still at its beginning."""
    _, kept, config, folder = prepare([*overrides, f"run_dir={folder}"])
    run_folder.write_config(folder, config, recipe="stdlib_gpt", overrides=kept)
    return folder


@pytest.mark.parametrize(
    "earlier", [["strategy.zero_stage=1"], ["strategy=zero2", "trainer.devices=2"], ["layout=tp2"], []], ids=str
)
def test_resumed_run_takes_a_new_layout_whatever_laid_it_out_before(in_empty_folder, earlier):
    folder = made_earlier("run", "trainer.max_steps=7", *earlier)
    _, _, config, found = prepare(["run_dir=run", "resume=auto", "layout=zero3x4"])
    assert found == folder
    assert config["trainer"]["devices"] == 4 and config["trainer"]["max_steps"] == 7
    assert config["strategy"]["zero_stage"] == 3 and config["strategy"]["tensor_parallel_size"] == 1


def test_a_plain_file_to_resume_from_is_told_where_it_serves(in_empty_folder):
    (in_empty_folder / "plain.ckpt").touch()
    with pytest.raises(ConfigError, match=r"plain.ckpt is .* strategy.initial_weights=.*plain.ckpt"):
        prepare(["resume=plain.ckpt"])


def test_resume_takes_no_run_whose_name_only_begins_alike(in_empty_folder):
    names = ("gpt-20250101-000000", "gpt-20260101-000000-0a1b", "gpt-large-20270101-000000-ffff")
    for age, name in enumerate(names):
        folder = made_earlier(f"runs/{name}", f"name={name.partition('-20')[0]}")
        os.utime(folder / "config.yaml", (2e9 + age, 2e9 + age))
    assert prepare(["name=gpt", "resume=auto"])[3].name == names[1]


def test_two_runs_that_start_in_one_second_have_a_folder_each():
    assert prepare([])[3] != prepare([])[3]


def as_rank(monkeypatch, rank):
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)


def test_print_config_starts_nothing_under_torchrun_either(monkeypatch, in_empty_folder, capsys):
    as_rank(monkeypatch, "1")
    assert main(["train", "--print-config", "layout=tp2"]) == 0
    assert capsys.readouterr().out == ""
    as_rank(monkeypatch, "0")
    assert main(["train", "--print-config", "layout=tp2"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["trainer"]["devices"] == 2
    assert list(in_empty_folder.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--foo"], ["trainer.devices=4"], ["-m", "seed=1,2"]], ids=str)
def test_mistake_under_torchrun_is_told_by_one_rank(monkeypatch, arguments, capsys):
    as_rank(monkeypatch, "1")
    assert main(["train", *arguments]) == 2
    assert capsys.readouterr().err == ""
    as_rank(monkeypatch, "0")
    assert main(["train", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "The recipe has" not in error


def test_ranks_that_cannot_talk_are_told_before_a_folder_is_made(monkeypatch, in_empty_folder, capsys):
    as_rank(monkeypatch, "0")
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert main(["train", "layout=tp2"]) == 2
    assert "but not by torchrun" in capsys.readouterr().err
    assert list(in_empty_folder.iterdir()) == []


@pytest.mark.parametrize("command", [["train", "layout=tp2"], ["train", "-m", "layout=tp2,pp2"]], ids=str)
def test_command_that_srun_has_started_several_times_is_refused(monkeypatch, in_empty_folder, command, capsys):
    def never(*_, **__):
        raise AssertionError("something was started")

    monkeypatch.setattr(sweep, "start", never)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert main(command) == 2
    assert "these would be 4 runs" in capsys.readouterr().err
    assert list(in_empty_folder.iterdir()) == []


@pytest.mark.parametrize("command", ["verify", "export", "generate"])
@pytest.mark.parametrize("starter", ["torchrun", "srun"])
def test_command_of_one_process_that_is_started_several_times_is_refused_by_one(monkeypatch, starter, command, capsys):
    for rank in ("1", "0"):
        if starter == "torchrun":
            as_rank(monkeypatch, rank)
        else:
            monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
            monkeypatch.setenv("SLURM_PROCID", rank)
        if rank == "1":
            with pytest.raises(SystemExit, match="2"):
                main([command])
            assert capsys.readouterr().err == ""
    assert main([command]) == 2
    assert f"has started lightning-3d {command} 2 times" in capsys.readouterr().err


def test_config_of_an_earlier_start_is_kept_where_there_are_no_hard_links(monkeypatch, in_empty_folder):
    def no_links(*_, **__):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", no_links)
    for seed in (1, 2, 3):
        run_folder.write_config(in_empty_folder, {"seed": seed}, recipe="digits_mlp", overrides=[])
    kept = [in_empty_folder / name for name in ("config.1.yaml", "config.2.yaml", "config.yaml")]
    assert [yaml.safe_load(path.read_text())["seed"] for path in kept] == [1, 2, 3]


def recipe_with(folder, **groups):
    """A recipe like digits_mlp whose groups are these."""
    text = yaml.safe_dump({"defaults": [
        "base", {"strategy": "3d"}, {"model": "digits_mlp"}, {"data": "digits"}, {"trainer": "default"},
        {"callbacks": "default"}, {"logger": "none"}, "_self_",
    ], "name": "mine", **groups})  # fmt: skip
    (folder / "mine.yaml").write_text(text)
    return "recipe=mine.yaml"


def test_recipe_without_callbacks_makes_a_run_without_any(in_empty_folder):
    config = prepare([recipe_with(in_empty_folder, callbacks=None), "layout=single"])[2]
    check_parts(config)
    trainer = build_trainer(config)
    assert not [callback for callback in trainer.callbacks if isinstance(callback, Checkpoint)]


@pytest.mark.parametrize("command", ["train", "verify"])
@pytest.mark.parametrize("group", ["strategy", "model", "data", "trainer"])
@pytest.mark.parametrize("node", [None, {"_target_": None}], ids=str)
def test_group_that_describes_nothing_is_refused_by_name(in_empty_folder, command, group, node, capsys):
    assert main([command, recipe_with(in_empty_folder, **{group: node})]) == 2
    error = capsys.readouterr().err
    assert f"{group}" in error and "describes nothing" in error and error.count("\n") == 1


@pytest.mark.parametrize("filename", ["/etc/x", "../x", "sub/{step}", "{val/loss:.2f}"])
def test_checkpoints_that_resume_would_not_find_are_refused_whatever_their_callback_is_called(
    filename, in_empty_folder, capsys
):
    checkpoint = {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "filename": filename}
    assert main(["train", recipe_with(in_empty_folder, callbacks={"mine": checkpoint}), "layout=single"]) == 2
    assert f"callbacks.mine.filename='{filename}'" in capsys.readouterr().err


def test_metric_with_a_slash_names_a_checkpoint_where_its_name_is_left_out(in_empty_folder):
    checkpoint = {
        "_target_": "lightning.pytorch.callbacks.ModelCheckpoint",
        "filename": "loss={val/loss:.2f}",
        "auto_insert_metric_name": False,
    }
    prepare([recipe_with(in_empty_folder, callbacks={"mine": checkpoint}), "layout=single"])
