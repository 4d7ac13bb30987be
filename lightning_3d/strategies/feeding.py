"""What Lightning asks a strategy about data: each rank's part of it, and the place from which a resumed run goes on."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.trainer.states import RunningStage

from lightning_3d.errors import DataError
from lightning_3d.parallel.mesh import data_parallel_group, new_group
from lightning_3d.strategies.batches.alike import Alike
from lightning_3d.strategies.batches.global_batches import Progress
from lightning_3d.strategies.batches.in_step import InStep
from lightning_3d.strategies.batches.predictions import gather_predictions
from lightning_3d.strategies.batches.sampling import shard_dataloader
from lightning_3d.strategies.batches.snapshots import remembering
from lightning_3d.strategies.checkpointing import CheckpointingStrategy

# More than a run has epochs, whose numbers are added too.
_SEED_STEP = 1_000_003


class FeedingStrategy(CheckpointingStrategy):
    """A strategy that shares data out over the data-parallel ranks; arguments as in `CheckpointingStrategy`."""

    _shards_data = False
    # Of each training loader, as a checkpoint has told them; used up as the loaders come.
    _places: list[dict[str, Any]] | None = None
    _longest = -1.0
    # Loaders that were put at the end of their epoch, and the places that put them there.
    _at_end: tuple[tuple[Any, dict[str, Any]], ...] = ()
    _in_step: InStep | None = None
    _alike: Alike | None = None
    # Of each loader since loaders were last set up, whether it is shared out; and whether a step has come since.
    _shared_out: Mapping[RunningStage, list[bool]] = MappingProxyType({})
    _stepped = True
    # Equal on every rank.
    _seed = 0

    def setup_environment(self) -> None:
        super().setup_environment()
        assert self.lightning_module is not None
        self._take_over_sampling(self.lightning_module.trainer)

    def _take_over_sampling(self, trainer: L.Trainer) -> None:
        # Lightning's own sampler shuffles a loader that asked for order, and repeats samples to come out even.
        connector = trainer._accelerator_connector
        if connector.use_distributed_sampler:
            self._shards_data = True
            connector.use_distributed_sampler = False

    # ------------------------------------------------------------------ loaders

    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        assert trainer.state.stage is not None
        training = trainer.state.stage == RunningStage.TRAINING
        if self._stepped:
            self._shared_out, self._stepped = defaultdict(list), False
        before = self._shared_out[trainer.state.stage]
        seed = int(os.environ.get("PL_GLOBAL_SEED", self._seed))
        loader: Any = dataloader
        if self._shards_data:
            loader = shard_dataloader(
                loader,
                **self.distributed_sampler_kwargs,
                # Loaders that are read side by side have orders of their own.
                seed=seed + _SEED_STEP * len(before),
                progress=lambda: _progress(trainer),
            )
        ours = loader is not dataloader
        before.append(ours)
        if training and not ours and isinstance(loader, _Stateful) and sized_len(loader) is None:
            loader = remembering(loader, progress=lambda: _progress(trainer))
        if training:
            self._continue(loader, trainer, ours=ours)
        if self.layout.world_size == 1:
            return loader
        if self._in_step is None or self._alike is None:
            # Ranks of a GPU must not wait for it to learn whether there is a batch.
            group = None if dist.get_backend() == "gloo" else new_group(backend="gloo")
            self._in_step = InStep(group=group)
            loop: Any = trainer.fit_loop.epoch_loop
            self._alike = Alike(
                group=group,
                data_parallel_rank=self.data_parallel_rank,
                trained=lambda: loop.batch_progress.total.processed,
            )
        name = trainer.state.stage.dataloader_prefix or ""
        loader = self._in_step.keep(loader, name=name, sharded=ours)
        # Nor may they give the same views of one dataset.
        return self._alike.keep(loader, name=name, source=f"{seed}/{name}/{len(before)}")

    def _continue(self, loader: Any, trainer: L.Trainer, *, ours: bool) -> None:
        """Put a training loader where the checkpoint says, or else at the start of Lightning's epoch."""
        places = self._places or []
        stateful = isinstance(loader, _Stateful)
        if not stateful or not places:
            if ours:
                # Lightning makes an iterator, whose workers begin to read, before it tells the epoch.
                epochs: Any = trainer.fit_loop.epoch_progress.current
                _sampler(loader).set_epoch(epochs.processed)
            return
        place = places.pop(0)
        if "of_ranks" in place:
            if len(place["of_ranks"]) != self.data_parallel_size:
                raise DataError(
                    f"the checkpoint has the place of a {type(loader).__name__} on {len(place['of_ranks'])} "
                    f"data-parallel ranks, now there are {self.data_parallel_size}. Use as many, or a loader that this "
                    "strategy shares out."
                )
            place = place["of_ranks"][self.data_parallel_rank]
        if not ours:
            if not _progress(trainer).finished:
                loader.load_state_dict(place)
            elif trainer.fit_loop.restarting and sized_len(loader) is None:
                _set_batches(trainer, 0, in_all=False)
            return
        if "samples" not in place:
            raise DataError(
                f"the checkpoint has the place of a loader of another kind than {type(loader).__name__}. Give the "
                "loader that the run was saved with, and the same use_distributed_sampler."
            )
        # The gradients of an open accumulation window are not saved: its samples have had no effect yet.
        batches = loader.load_state_dict(place, at="window")
        if place["finished"]:
            self._at_end = (*self._at_end, (loader, place))
        length = sized_len(loader)
        if trainer.fit_loop.restarting and (length or float("inf")) > self._longest:
            self._longest = length or float("inf")
            if length is None and place["finished"]:
                # Lightning begins the next epoch, but does not know that this one, without a length, had ended.
                _set_batches(trainer, 0, in_all=False)
            else:
                _set_batches(trainer, batches)

    def on_train_start(self) -> None:
        if self._places:
            raise DataError(
                f"the checkpoint has the places of {len(self._places)} more training loaders than there are. Give the "
                "loaders that the run was saved with."
            )
        super().on_train_start()
        assert self.lightning_module is not None
        if self.lightning_module.trainer.fit_loop.epoch_loop.restarting:
            # The end of the epoch is still to come, and then another iterator, which draws as the one just made.
            for loader, place in self._at_end:
                loader.load_state_dict(place, at="window")
        self._places, self._longest, self._at_end = None, -1.0, ()

    def _begin_step(self, step: str, args: Sequence[Any]) -> None:
        super()._begin_step(step, args)
        self._stepped = True

    def on_predict_end(self) -> None:
        assert self.lightning_module is not None
        gather_predictions(
            self.lightning_module.trainer,
            shared_out=self._shared_out[RunningStage.PREDICTING],
            group=data_parallel_group(self.mesh),
        )

    # ------------------------------------------------------------------ checkpoints

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        if loop.get("combined_loader"):
            loop["combined_loader"] = [self._of_all_ranks(place) for place in loop["combined_loader"]]
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _of_all_ranks(self, place: dict[str, Any]) -> dict[str, Any]:
        """A place that is the same for all ranks, or those of each; collective."""
        if "samples" in place and place.get("shards") is None:
            return place
        found: list[Any] = [None] * self.data_parallel_size
        dist.all_gather_object(found, place, group=data_parallel_group(self.mesh))
        return {"of_ranks": found}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
        # Lightning would not load them at the end of an epoch, and knows of no other number of ranks.
        places = loop.pop("combined_loader", None)
        if self._goes_on:
            self._places, self._at_end = places, ()
        return checkpoint


def _progress(trainer: L.Trainer) -> Progress:
    loop: Any = trainer.fit_loop.epoch_loop
    done = loop.batch_progress.current.processed
    finished = loop.batch_progress.is_last_batch and loop.batch_progress.current.ready == done
    automatic = trainer.lightning_module.automatic_optimization
    window = done if finished or not automatic else done - done % trainer.accumulate_grad_batches
    return Progress(batches=done, window=window, finished=finished)


def _set_batches(trainer: L.Trainer, batches: int, *, in_all: bool = True) -> None:
    """Let Lightning count on from so many batches in this epoch, and from as many more or fewer `in_all`."""
    loop: Any = trainer.fit_loop.epoch_loop
    change = batches - loop.batch_progress.current.processed
    for counts in (loop.batch_progress.current, loop.batch_progress.total)[: 1 + in_all]:
        for name in ("ready", "started", "processed", "completed"):
            setattr(counts, name, getattr(counts, name) + change)


def _sampler(loader: Any) -> Any:
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler.sampler
