"""A strategy that starts only where all ranks are alike, and watches the numbers of its steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import lightning as L
from lightning.pytorch.loops.optimization.automatic import ClosureResult

from lightning_3d.parallel.mesh import data_parallel_group
from lightning_3d.strategies.feeding import FeedingStrategy
from lightning_3d.strategies.guards.finite import FiniteSteps, without_logs
from lightning_3d.strategies.guards.replay import Replay, refuse_windows
from lightning_3d.strategies.guards.start_check import (
    describe_job,
    describe_module,
    describe_optimizers,
    refuse_differences,
)
from lightning_3d.strategies.guards.whole_gradients import WholeGradients


class GuardedStrategy(FeedingStrategy):
    """Arguments as in `FeedingStrategy`."""

    _nonfinite = "error"
    _replay_every_n_steps = 0
    _steps: FiniteSteps | None = None
    _last_args: tuple[Any, ...] = ()

    @abstractmethod
    def _compute_step(self, *args: Any, **kwargs: Any) -> Any:
        """The user's `training_step`, under a pipeline with its backward."""

    @abstractmethod
    def _settings_of_all_ranks(self) -> Mapping[str, Any]:
        """What every rank was given alike, by name."""

    @abstractmethod
    def _compute_forward(self, args: tuple[Any, ...]) -> Any:
        """The forward of the user's `training_step`."""

    # ------------------------------------------------------------------ starting

    def _refuse_differences(self, trainer: L.Trainer, *, new: bool) -> None:
        """Before the ranks wait for each other; collective.

        Args:
            new: the module is not laid out yet.
        """
        if self.layout.world_size == 1:
            return
        assert self.lightning_module is not None
        job = describe_job(trainer, ckpt_path=self._ckpt_path, settings=self._settings_of_all_ranks())
        refuse_differences(job | describe_module(self.lightning_module) if new else job)

    def _refuse_different_optimizers(self) -> None:
        if self.layout.data > 1:
            # Stages of a pipeline may have groups of their own.
            refuse_differences(describe_optimizers(self.optimizers), group=data_parallel_group(self.mesh))

    def _watch_steps(self, trainer: L.Trainer) -> None:
        plugin: Any = self.precision_plugin
        assert self.lightning_module is not None
        if self._replay_every_n_steps:
            refuse_windows(
                accumulate_grad_batches=trainer.accumulate_grad_batches,
                automatic_optimization=self.lightning_module.automatic_optimization,
            )
        # A loss scaler expects overflows, and leaves their steps out itself.
        action = "ignore" if getattr(plugin, "scaler", None) is not None else self._nonfinite
        steps = self._steps = FiniteSteps(
            self.lightning_module, action=action, device=self.root_device, rerun=self._compute_forward
        )
        clip = MethodType(type(plugin)._clip_gradients, plugin)
        whole = None
        if self.layout.tensor > 1:
            whole = WholeGradients(self.lightning_module, group=self.mesh["tp"].get_group())

        def clip_finite(model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            steps.before_update(optimizer)
            if whole is not None:
                whole.before_update(optimizer)
            clip(model, optimizer, *args, **kwargs)

        # After the user's hooks, which may have put gradients right.
        plugin._clip_gradients = clip_finite

    # ------------------------------------------------------------------ steps

    def _begin_step(self, step: str, args: Sequence[Any]) -> None:
        super()._begin_step(step, args)
        if step == "training_step":
            self._last_args = tuple(args)
            if self._steps is not None:
                self._steps.began(self._last_args)

    def _saw_step(self, output: Any) -> None:
        if self._steps is not None:
            self._steps.saw(output)

    def _replayed(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of an optimizer step, which now and then computes the step twice."""
        assert self.lightning_module is not None
        module, every = self.lightning_module, self._replay_every_n_steps
        if not every or (module.trainer.global_step + 1) % every:
            return closure

        def call() -> Any:
            # What a resumed run does before its first step must not come between the two.
            self._before_step()
            return Replay(module, self.share).compare(closure, self._compute_again)

        return call

    def _compute_again(self) -> Any:
        assert self.lightning_module is not None
        module, plugin = self.lightning_module, self.precision_plugin
        with without_logs(module), self._quiet():
            output = self._compute_step(*self._last_args)
        result = ClosureResult.from_training_step_output(output)
        scaler: Any = getattr(plugin, "scaler", None)
        assert result.closure_loss is not None
        with self.share.backward_pass():
            module.backward(result.closure_loss if scaler is None else scaler.scale(result.closure_loss))
        return result.loss

    def _quiet(self) -> Any:
        return nullcontext()

    # ------------------------------------------------------------------ before it is too late

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._steps is not None:
            self._steps.settle()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def on_train_end(self) -> None:
        if self._steps is not None:
            self._steps.settle()
        super().on_train_end()
