"""What a strategy needs of a module that data parallelism has prepared."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup


class Share:
    """One rank's share of a module: how its code runs and when its gradients are combined.

    This base class is the whole module of one process.

    Args:
        module: the user's module; keeps its class, its parameters' names and its place in the user's code.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def roots(self) -> list[nn.Module]:
        """FSDP2's roots, which must know when what is below them moves."""
        return []

    @property
    def norm_group(self) -> ProcessGroup | None:
        """Ranks that have other parameters, whose gradients belong to the same norm."""
        return None

    @property
    def aliases(self) -> dict[str, str]:
        """The first name, in the whole model, of parameters that have another name here."""
        return {}

    @property
    def elsewhere(self) -> frozenset[str]:
        """Names of the whole model's state that other ranks have."""
        return frozenset()

    @property
    def parameter_names(self) -> list[str]:
        """Names of the whole model's parameters, in its order; the first one of each."""
        return [name for name, _ in self.module.named_parameters()]

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's copy of a parameter is the one that counts in the norm."""
        return True

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`function(*args, **kwargs)`, where it may use all parameters as ordinary whole tensors."""
        return function(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """A backward inside does not end an accumulation window: its gradients may stay local."""
        return nullcontext()

    def backward_pass(self) -> AbstractContextManager[None]:
        """Around each backward, also one that is called inside `run` (manual optimization): its end is where gradients
        are combined, whatever the loss has reached.
        """
        return nullcontext()

    def reshard(self) -> None:
        """Forget gathered parameters: what the shards hold has changed, or is about to."""

    def refresh(self) -> None:
        """Gather anew what a running function may use."""
