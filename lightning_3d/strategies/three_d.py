"""`Trainer(strategy="3d")`: the Lightning shell around `lightning_3d.parallel` and `lightning_3d.checkpoint`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_3d.errors import ConfigError
from lightning_3d.layout import Layout, Size
from lightning_3d.parallel.compose import compose
from lightning_3d.parallel.gradients import clip_by_norm_, clip_by_value_, global_norm
from lightning_3d.parallel.init import Recording, record_initialization, record_operations
from lightning_3d.parallel.mesh import data_parallel_group, host_data_parallel_group
from lightning_3d.parallel.share import Share
from lightning_3d.parallel.staged import StagedModule
from lightning_3d.strategies.draws import StepSeeds
from lightning_3d.strategies.guarded import GuardedStrategy
from lightning_3d.strategies.guards.agreement import agree_on_plateaus, show_whole_scalars
from lightning_3d.strategies.guards.equal_buffers import share_buffers_, warn_of_local_statistics
from lightning_3d.strategies.guards.finite import check_action
from lightning_3d.strategies.guards.replay import check_replay
from lightning_3d.strategies.logs import share_metrics
from lightning_3d.strategies.optimizers import optimizers_of_a_part, step_over_shards
from lightning_3d.strategies.pipelined_step import Context, PipelinedStep, warn_of_coupled_samples
from lightning_3d.strategies.saving import resume
from lightning_3d.strategies.saving.averaging import average_shards
from lightning_3d.strategies.saving.plain_files import check_initial_weights
from lightning_3d.strategies.saving.tied_groups import agree_on_tied_groups
from lightning_3d.strategies.scaler import agree_on_overflow


class ThreeDStrategy(GuardedStrategy):
    """Trains an ordinary LightningModule under data, tensor and pipeline parallelism with ZeRO sharding.

    Args:
        data_parallel_size, data_parallel_replicas, tensor_parallel_size, pipeline_parallel_size, zero_stage, schedule,
        num_microbatches: as in `Layout`.
        process_group_backend: None takes nccl for CUDA and gloo for the CPU.
        timeout_seconds: after which the job ends where a rank waits for another, or a step gets no further.
        loss_parallel: under tensor parallelism, keep logits split over the vocabulary: `F.cross_entropy` then runs on
            the parts, and anything else gathers them.
        sequence_parallel: under tensor parallelism, blocks work on parts of the sequence where no layer is split.
        nonfinite: what becomes of a step whose loss or gradients are not finite: "error", which says where it began;
            "skip", on all ranks, as a step of fp16 that overflows; or "ignore". Under a loss scaler it is left to that.
        replay_every_n_steps: compute every such step twice and compare the bits; 0 for never.
        async_checkpoint: go on training while a copy of each checkpoint is written.
        storage_options: for fsspec, where checkpoints are below a URL (s3://..., memory://...).
        initial_weights: what the model starts from, unless a run is resumed: a Hugging Face folder, a .safetensors,
            state_dict or plain Lightning .ckpt file, or a checkpoint folder. Each rank reads its part.

    Raises:
        LayoutError: when the Trainer is built, before any process starts.
        ConfigError: likewise, a setting of the wrong type, or nothing at `initial_weights`.
    """

    def __init__(
        self,
        data_parallel_size: Size = "auto",
        data_parallel_replicas: int = 1,
        tensor_parallel_size: Size = 1,
        pipeline_parallel_size: Size = 1,
        zero_stage: int = 3,
        schedule: str = "1f1b",
        num_microbatches: int | None = None,
        process_group_backend: str | None = None,
        timeout_seconds: float = 1800,
        loss_parallel: bool = False,
        sequence_parallel: bool = False,
        nonfinite: str = "error",
        replay_every_n_steps: int = 0,
        async_checkpoint: bool = False,
        storage_options: dict[str, Any] | None = None,
        initial_weights: str | Path | None = None,
    ) -> None:
        for name, value in (
            ("loss_parallel", loss_parallel),
            ("sequence_parallel", sequence_parallel),
            ("async_checkpoint", async_checkpoint),
        ):
            if not isinstance(value, bool):
                raise ConfigError(f"{name}={value!r} must be True or False. Set {name}=False to leave it out.")
        layout = Layout(
            data_parallel_size=data_parallel_size,
            data_parallel_replicas=data_parallel_replicas,
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=pipeline_parallel_size,
            zero_stage=zero_stage,
            schedule=schedule,
            num_microbatches=num_microbatches,
        )
        super().__init__(
            layout,
            process_group_backend=process_group_backend,
            timeout_seconds=timeout_seconds,
            async_checkpoint=async_checkpoint,
            storage_options=storage_options,
        )
        self._nonfinite = check_action(nonfinite)
        self._replay_every_n_steps = check_replay(replay_every_n_steps)
        self._loss_parallel = loss_parallel
        self._sequence_parallel = sequence_parallel
        self._initial_weights = check_initial_weights(initial_weights)
        self._recording = Recording()
        self._pipelined: PipelinedStep | None = None
        self._seeds: StepSeeds | None = None
        self._accumulating = False

    # ------------------------------------------------------------------ starting

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        layout = self.layout
        unused = ["loss_parallel=True"] if self._loss_parallel and layout.tensor == 1 else []
        unused += ["sequence_parallel=True"] if self._sequence_parallel and layout.tensor == 1 else []
        unused += [f"schedule={layout.schedule!r}"] if layout.schedule != "1f1b" and layout.pipeline == 1 else []
        if unused:
            rank_zero_warn(f"{', '.join(unused)} has no effect in the layout {layout.name}, which lacks that axis.")

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        with self.precision_plugin.tensor_init_context():
            yield

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Around `configure_model`: what it builds has no memory yet, and is recorded to be filled shard by shard."""
        with record_initialization(self._recording):
            yield

    def setup(self, trainer: L.Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        new = self._share is None or self._share.module is not self.lightning_module
        self._refuse_differences(trainer, new=new)
        if new:
            self._share = self._compose(self.lightning_module)
            if self._initial_weights is not None and self._ckpt_path is None:
                resume.load_initial_weights_(self, self._initial_weights)
        self.model = self.lightning_module
        self._reset_optimizers_and_schedulers()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            with optimizers_of_a_part(self.lightning_module) if self.layout.pipeline > 1 else nullcontext():
                self.setup_optimizers(trainer)
            if self.layout.pipeline > 1:
                agree_on_tied_groups(self)
            self._refuse_different_optimizers()
            for optimizer in self.optimizers:
                step_over_shards(optimizer)
            if self.lightning_module.automatic_optimization:
                agree_on_plateaus(self.lr_scheduler_configs, reduce=self.reduce, device=self.root_device)
        self.setup_precision_plugin()
        if fitting:
            self._watch_steps(trainer)
            self._separate_random_streams()
            average_shards(trainer, self.share)

    def _settings_of_all_ranks(self) -> dict[str, Any]:
        return {
            **self.layout.as_dict(),
            "loss_parallel": self._loss_parallel,
            "sequence_parallel": self._sequence_parallel,
            "nonfinite": self._nonfinite,
            "replay_every_n_steps": self._replay_every_n_steps,
            "async_checkpoint": self._async_checkpoint,
        }

    def _compose(self, module: L.LightningModule) -> Share:
        _refuse_composed(module, self)
        self._pipelined = None
        if self.layout.pipeline > 1 and not module.automatic_optimization:
            raise ConfigError(
                f"{type(module).__name__} sets automatic_optimization=False, but a pipeline runs the backward itself. "
                "Set pipeline_parallel_size=1, or use automatic optimization."
            )
        self._seed = self._recording.seed = self.broadcast(torch.initial_seed())
        self._seeds = StepSeeds(module, seed=self._seed, data_parallel_rank=self.data_parallel_rank)
        if self._layer_sync is not None:
            # Changes the module's own layers in place.
            self._layer_sync.apply(module)
            for part in module.modules():
                if isinstance(part, torch.nn.SyncBatchNorm):
                    part.process_group = data_parallel_group(self.mesh)
        with record_operations(self._recording):
            self.precision_plugin.convert_module(module)
        if self.layout.pipeline > 1:
            warn_of_coupled_samples(module)
        elif self.layout.data > 1:
            warn_of_local_statistics(module)
        share = compose(
            module,
            layout=self.layout,
            mesh=self.mesh,
            device=self.root_device,
            recording=self._recording,
            loss_parallel=self._loss_parallel,
            sequence_parallel=self._sequence_parallel,
        )
        self._recording = Recording()
        module.to(self.root_device)
        data_group = data_parallel_group(self.mesh)
        if self.layout.data < self.layout.world_size:
            share_metrics(
                module,
                pipeline_group=self.mesh["pp"].get_group(),
                data_group=data_group,
                running=lambda: self._pipelined is not None and self._pipelined.running,
            )
        if isinstance(share, StagedModule):
            self._pipelined = PipelinedStep(
                module,
                share,
                layout=self.layout,
                group=self.mesh["pp"].get_group(),
                data_group=data_group,
                count_group=host_data_parallel_group(self.mesh),
                seeds=self._seeds,
            )
        module.__dict__["_lightning_3d_strategy"] = self
        return share

    def _separate_random_streams(self) -> None:
        """Ranks that see different data draw different dropout masks; rank 0 goes on as one process would."""
        if self.data_parallel_rank > 0:
            torch.manual_seed(torch.initial_seed() + self.data_parallel_rank * 1_000_003)

    def model_to_device(self) -> None:
        """`compose` has put every part where it belongs."""

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin: Any = self.precision_plugin
        if getattr(plugin, "scaler", None) is not None:
            agree_on_overflow(plugin.scaler)
        show_whole_scalars(plugin)
        # Stock clipping knows neither several axes nor a mix of sharded and whole parameters.
        plugin.clip_grad_by_norm = lambda optimizer, clip_val: clip_by_norm_(
            plugin.main_params(optimizer), max_norm=clip_val, share=self.share
        )
        plugin.clip_grad_by_value = lambda optimizer, clip_val: clip_by_value_(
            plugin.main_params(optimizer), max_value=clip_val
        )

    # ------------------------------------------------------------------ stepping

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        self._begin_step("training_step", args)
        self._before_step()
        output = self._compute_step(*args, **kwargs)
        self._saw_step(output)
        return output

    def _compute_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if self._pipelined is not None:
            return self._train_pipelined(self._pipelined, args)
        with self.precision_plugin.train_step_context(), self._equal_draws("training_step"):
            return self.share.run(self.lightning_module.training_step, *args, **kwargs)

    def _compute_forward(self, args: tuple[Any, ...]) -> Any:
        assert self.lightning_module is not None
        return self._evaluate(self.lightning_module.training_step, self.precision_plugin.train_step_context, args)

    def _quiet(self) -> Any:
        return nullcontext() if self._pipelined is None else self._pipelined.quiet()

    def _train_pipelined(self, pipelined: PipelinedStep, args: tuple[Any, ...]) -> Any:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        window: int = trainer.accumulate_grad_batches
        scaler = getattr(self.precision_plugin, "scaler", None)
        return pipelined.train(
            args,
            context=self.precision_plugin.train_step_context,
            factor=(scaler.get_scale() if scaler is not None else 1.0) / window,
            first=trainer.fit_loop.epoch_loop.batch_idx % window == 0,
            last=not self._accumulating,
        )

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        return self._evaluate(self.lightning_module.validation_step, self.precision_plugin.val_step_context, args)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        return self._evaluate(self.lightning_module.test_step, self.precision_plugin.test_step_context, args)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        return self._evaluate(self.lightning_module.predict_step, self.precision_plugin.predict_step_context, args)

    def evaluate(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)` as a validation step would run: without gradients, and on every rank the whole result.

        For callbacks; all ranks must call it. Under a pipeline the function calls the model once, and its first
        argument is a batch, which is cut into micro-batches.
        """
        return self._evaluate(function, self.precision_plugin.forward_context, args)

    def _evaluate(self, function: Callable[..., Any], context: Context, args: tuple[Any, ...]) -> Any:
        with _no_grad(), self._evaluation_step(function.__name__, args):
            if self._pipelined is not None:
                return self._pipelined.evaluate(function, args, context=context)
            with context(), self._equal_draws(function.__name__):
                return self.share.run(function, *args)

    def _equal_draws(self, step: str) -> AbstractContextManager[None]:
        """Tensor-parallel ranks draw alike in a step, whatever one of them has drawn between two."""
        assert self._seeds is not None
        return self._seeds.drawing(step) if self.layout.tensor > 1 else nullcontext()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self._accumulating = True
        try:
            with self.share.no_sync():
                yield
        finally:
            self._accumulating = False

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        with self.share.backward_pass():
            return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        # In manual optimization this is called inside a running step, which goes on with the new weights.
        self.share.reshard()
        result = super().optimizer_step(optimizer, self._replayed(closure), model, **kwargs)
        self.share.reshard()
        self.share.refresh()
        self._end_step()
        return result

    # ------------------------------------------------------------------ buffers

    def _make_buffers_equal(self) -> None:
        """Ranks train on their own; collective."""
        assert self.lightning_module is not None
        if self.layout.data > 1:
            share_buffers_(self.lightning_module, group=data_parallel_group(self.mesh))

    def on_validation_start(self) -> None:
        self._make_buffers_equal()
        super().on_validation_start()

    def on_test_start(self) -> None:
        self._make_buffers_equal()
        super().on_test_start()

    def on_predict_start(self) -> None:
        self._make_buffers_equal()
        super().on_predict_start()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        # In place, for the dictionary has them already.
        self._make_buffers_equal()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # ------------------------------------------------------------------ norm

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients of the whole model, equal on every rank; collective."""
        assert self.lightning_module is not None
        return global_norm(self.lightning_module.parameters(), norm_type=norm_type, share=self.share)


@contextmanager
def _no_grad() -> Iterator[None]:
    """As Lightning's evaluation, but parameters gathered here must still serve a later backward."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _refuse_composed(module: L.LightningModule, strategy: ThreeDStrategy) -> None:
    other = module.__dict__.get("_lightning_3d_strategy")
    if other is not None and other is not strategy:
        raise ConfigError(
            f"this {type(module).__name__} is already laid out as {other.layout.name} by another Trainer. "
            "Use that Trainer again, or build a new module and load a checkpoint into it."
        )
