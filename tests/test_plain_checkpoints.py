"""Plain Lightning's .ckpt, state_dict files and Hugging Face folders load into every layout, or say what is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from modules import Rows, TinyGPT
from safetensors.torch import save_file
from training import Recorder, ordered, run, trainer_for, whole_weights

from lightning_3d import Layout
from lightning_3d.errors import CheckpointError, ConfigError, ModelError
from lightning_3d.models.gpt import GPT
from lightning_3d.strategies.saving.plain_files import check_initial_weights

pytestmark = pytest.mark.distributed

# The checkpoint is of the end of an epoch: inside of one, plain Lightning keeps no position in the data.
BEFORE, STEPS = 5, 7
SOME = ["single", "zero3x2-tp2", "tp2-pp2"]
OTHERS = ["dp2", "zero1x2", "zero2x2-pp2", "hsdp2x2", "pp2@interleaved1f1b"]
LAYOUTS = [*SOME, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]


class FourBlocks(TinyGPT):
    """With a block for each of four stages, frozen parameters and a buffer."""

    def _build(self) -> None:
        super()._build()
        self.model = GPT(replace(self.model.config, num_layers=4))  # type: ignore[union-attr]
        self.model.layers[1].attention_norm.weight.requires_grad_(False)
        self.register_buffer("seen", torch.full((3,), 7.0))


def fit(layout: str | None, folder: Path, ckpt_path: Path | str | None, steps: int) -> dict[str, Any]:
    """`layout` None is plain Lightning."""
    L.seed_everything(1, verbose=False)
    module, recorder = FourBlocks(lazy=True), Recorder()
    callbacks = [recorder]
    if ckpt_path is None:
        callbacks += [ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=BEFORE, save_top_k=-1)]
    trainer = trainer_for(
        layout,
        max_steps=steps,
        max_epochs=9,
        precision="64-true",
        callbacks=callbacks,
        enable_checkpointing=ckpt_path is None,
    )
    loader = ordered(Rows(), replicas=Layout.parse(layout).data if layout else 1)
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    result = {"losses": recorder.losses, "norms": recorder.norms, "rates": rates, "step": trainer.global_step}
    return {**result, "weights": whole_weights(module)}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A .ckpt of one process at the end of an epoch, and what that process did until the end."""
    folder = tmp_path_factory.mktemp("plain")
    (result,) = run(None, fit, folder, None, STEPS)
    return folder / f"step={BEFORE}.ckpt", result


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_plain_ckpt_goes_on_in_any_layout(plain: tuple[Path, dict[str, Any]], tmp_path: Path, layout: str) -> None:
    path, expected = plain
    ranks = run(layout, fit, tmp_path, path, STEPS)
    losses = [sum(step) / len(ranks) for step in zip(*(rank["losses"] for rank in ranks), strict=True)]
    assert losses == pytest.approx(expected["losses"][BEFORE:], rel=1e-9)
    for rank in ranks:
        assert rank["step"] == STEPS and rank["rates"] == expected["rates"]
        assert rank["norms"] == pytest.approx(expected["norms"][BEFORE:], rel=1e-9)
        for name, value in rank["weights"].items():
            assert torch.allclose(value, expected["weights"][name], rtol=0, atol=1e-9), name


@pytest.mark.parametrize("protocol", ["file", "local"])
def test_a_plain_ckpt_at_a_url_of_this_machine_goes_on_too(
    plain: tuple[Path, dict[str, Any]], tmp_path: Path, protocol: str
) -> None:
    path, expected = plain
    (got,) = run("single", fit, tmp_path, f"{protocol}://{path}", STEPS)
    assert got["losses"] == pytest.approx(expected["losses"][BEFORE:], rel=1e-9)


def test_initial_weights_may_be_at_a_url_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "a b.ckpt").touch()
    assert check_initial_weights(f"file://{tmp_path}/a b.ckpt") == tmp_path / "a b.ckpt"
    with pytest.raises(ConfigError, match="initial_weights='memory://a.ckpt' is no file .* of this machine"):
        check_initial_weights("memory://a.ckpt")


def weights_of(layout: str, source: Path, prefix_free: bool) -> dict[str, Any]:
    L.seed_everything(2, verbose=False)
    module = FourBlocks(lazy=True)
    trainer = trainer_for(layout, limit_val_batches=1, precision="64-true")
    trainer.strategy._initial_weights = source  # type: ignore[attr-defined]
    if prefix_free:
        module.strict_loading = False
    trainer.validate(module, ordered(Rows(), replicas=Layout.parse(layout).data), verbose=False)
    return whole_weights(module)


FORMATS = [(layout, kind) for layout in [*SOME, *OTHERS] for kind in ("ckpt", "state_dict", "safetensors")]
QUICK = [("zero3x2-tp2", "safetensors"), ("tp2-pp2", "state_dict"), ("single", "ckpt")]


@pytest.mark.parametrize(
    ("layout", "kind"), [pytest.param(*one, marks=[] if one in QUICK else pytest.mark.slow) for one in FORMATS]
)
def test_initial_weights_come_from_any_file_in_any_layout(
    plain: tuple[Path, dict[str, Any]], tmp_path: Path, layout: str, kind: str
) -> None:
    path = plain[0]
    state = torch.load(path, weights_only=True)["state_dict"]
    if kind == "state_dict":
        path = tmp_path / "weights.pt"
        torch.save(state, path)
    if kind == "safetensors":
        # As Hugging Face stores them: one name of a tied pair, and names of the inner model alone.
        inner = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
        del inner["head.weight"]
        path = tmp_path / "model.safetensors"
        save_file(inner, path)
    got = run(layout, weights_of, path, kind == "safetensors")
    for rank in got:
        for name, value in rank.items():
            if kind != "safetensors" or name.startswith("model."):
                assert torch.equal(value, state[name]), name


def refusal(layout: str, folder: Path, ckpt_path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        fit(layout, folder, ckpt_path, STEPS)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["zero3x2", "tp2-pp2"])
def test_all_that_does_not_fit_is_told_in_one_error(
    plain: tuple[Path, dict[str, Any]], tmp_path: Path, layout: str
) -> None:
    checkpoint = torch.load(plain[0], weights_only=True)
    state = checkpoint["state_dict"]
    del state["model.layers.0.attention.wq.weight"], state["model.layers.3.attention.wq.weight"]
    state["model.layers.0.extra"] = state["model.layers.9.extra"] = torch.zeros(2)
    state["model.norm.weight"] = torch.zeros(5)
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    told, *others = run(layout, refusal, tmp_path, tmp_path / "bad.ckpt")
    assert all(other == told for other in others)
    for name in (
        "layers.0.attention.wq.weight",
        "layers.3.attention.wq.weight",
        "layers.0.extra",
        "layers.9.extra",
        "model.norm.weight",
    ):
        assert name in told, name


def refused_weights(layout: str, source: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        weights_of(layout, source, False)
    return str(caught.value)


@pytest.mark.parametrize("layout", ["zero3x2", "tp2-pp2"])
def test_stored_weights_that_lack_a_name_are_refused_with_all_that_is_missing(
    plain: tuple[Path, dict[str, Any]], tmp_path: Path, layout: str
) -> None:
    state = torch.load(plain[0], weights_only=True)["state_dict"]
    inner = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    del inner["head.weight"], inner["layers.0.attention.wq.weight"], inner["layers.3.attention.wq.weight"]
    save_file(inner, tmp_path / "model.safetensors")
    told, *others = run(layout, refused_weights, tmp_path / "model.safetensors")
    assert all(other == told for other in others)
    for name in ("layers.0.attention.wq.weight", "layers.3.attention.wq.weight", "temperature", "seen"):
        assert name in told, name
    assert "head.weight" not in told, "it is tied to what is there"


@pytest.mark.parametrize("layout", ["zero3x2", "pp2"])
def test_two_values_for_one_tied_weight_are_refused(
    plain: tuple[Path, dict[str, Any]], tmp_path: Path, layout: str
) -> None:
    state = torch.load(plain[0], weights_only=True)["state_dict"]
    twice = {name: value.clone() for name, value in state.items()}
    save_file(twice, tmp_path / "same.safetensors")
    assert run(layout, weights_of, tmp_path / "same.safetensors", False)
    head = twice["model.head.weight"]
    head[-1, -1] += 1
    save_file(twice, tmp_path / "unlike.safetensors")
    for told in run(layout, refused_weights, tmp_path / "unlike.safetensors"):
        assert "model.head.weight differs from model.embed.weight, but" in told, told
    # Of what does not fit, the first name counts, on all stages.
    for rank in run(layout, weights_of, tmp_path / "unlike.safetensors", True):
        for name in {"model.head.weight", "model.embed.weight"} & rank.keys():
            assert torch.equal(rank[name], state["model.embed.weight"]), name


class Untied(FourBlocks):
    def _build(self) -> None:
        super()._build()
        self.model = GPT(replace(self.model.config, tie_embeddings=False))  # type: ignore[union-attr]


def save_untied(layout: str, path: Path) -> None:
    L.seed_everything(1, verbose=False)
    trainer = trainer_for(layout, max_steps=1, precision="64-true")
    trainer.fit(Untied(lazy=True), ordered(Rows(), replicas=1))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("layout", ["single", "zero3x2", "pp2"])
def test_a_checkpoint_of_a_model_that_was_not_tied_is_refused_as_its_weights_alone_are(
    tmp_path: Path, layout: str
) -> None:
    run("single", save_untied, tmp_path / "untied.ckpt")
    for told in run(layout, refused_weights, tmp_path / "untied.ckpt"):
        assert "model.head.weight differs from model.embed.weight, but" in told, told


def test_weights_alone_are_no_run_to_go_on_with(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    torch.save(torch.load(plain[0], weights_only=True)["state_dict"], tmp_path / "weights.pt")
    assert all("initial_weights=" in told for told in run("zero3x2", refusal, tmp_path, tmp_path / "weights.pt"))


def test_initial_weights_that_are_nowhere_are_refused_before_any_process_starts() -> None:
    from lightning_3d import ThreeDStrategy

    with pytest.raises(ConfigError, match="hf download"):
        ThreeDStrategy(initial_weights="meta-llama/Llama-3.2-1B")


def test_an_optimizer_over_other_parameters_is_refused(plain: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    checkpoint = torch.load(plain[0], weights_only=True)
    checkpoint["optimizer_states"][0]["param_groups"][0]["params"].pop()
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    assert all("optimizer groups of" in told for told in run("tp2-pp2", refusal, tmp_path, tmp_path / "bad.ckpt"))


def test_a_hugging_face_folder_without_safetensors_says_how_to_write_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    (told,) = run("single", refused_folder, tmp_path)
    assert "holds neither model.safetensors nor" in told and "save_pretrained()" in told, told


def refused_folder(layout: str, folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        weights_of(layout, folder, False)
    return str(caught.value)


def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    from lightning_3d.models.weight_files import open_weights

    (tmp_path / "a.ckpt").write_text("nothing")
    for path in (tmp_path / "a.ckpt", tmp_path / "none.ckpt"):
        with pytest.raises(CheckpointError, match=path.name):
            open_weights(path)
