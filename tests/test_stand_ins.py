"""Stand-ins for what other pipeline ranks have: all that is known of it can be asked for, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_3d.errors import ModelError
from lightning_3d.parallel.placeholder import Absent, Placeholder, Shadow, is_placeholder


def test_shadow_tells_the_shape_without_a_value() -> None:
    calls: list[str] = []
    module = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16))
    module[0].register_forward_hook(lambda *_: calls.append("hook"))
    shadow = Shadow(module, device=torch.device("cpu"))
    output = shadow((torch.randn(5, 6),), {})
    assert isinstance(output, Placeholder) and output.shape == (5, 16)
    assert calls == []
    assert is_placeholder({"nested": [output * 2 + torch.ones(16)]})
    assert not is_placeholder(torch.zeros_like(output))
    assert not is_placeholder(output.new_ones(3))


@pytest.mark.parametrize("read", [bool, float, int, torch.Tensor.item, torch.Tensor.tolist])
def test_value_of_a_placeholder_cannot_be_read(read: Any) -> None:
    with pytest.raises(ModelError, match="reads the value of a tensor .* another pipeline rank"):
        read(torch.zeros(()).as_subclass(Placeholder))


def absent_head() -> Any:
    head = nn.Linear(3, 4, dtype=torch.bfloat16)
    return Absent(Shadow(head, device=torch.device("cpu")), name="model.head", on_call=lambda *_: None)


def test_facts_of_an_absent_weight_are_known() -> None:
    weight, hidden = absent_head().weight, torch.ones(2, 3)
    assert (weight.shape, weight.dtype, weight.device) == ((4, 3), torch.bfloat16, torch.device("cpu"))
    assert (weight.size(0), weight.ndim, weight.numel(), weight.requires_grad) == (4, 2, 12, True)
    assert repr(weight) == "AbsentWeight(model.head.weight, shape=(4, 3), dtype=torch.bfloat16)"
    with torch._C.DisableTorchFunctionSubclass():
        assert weight.untyped_storage().nbytes() == 2, "one number, however large the weight"
    for cast in (hidden.to(weight.dtype), hidden.to(weight), hidden.type_as(weight), weight.new_ones(2, 3)):
        assert type(cast) is torch.Tensor and torch.equal(cast, hidden.bfloat16())
    assert isinstance(hidden.as_subclass(Placeholder).to(weight), Placeholder)


@pytest.mark.parametrize(
    "use",
    [
        torch.sum, float, torch.Tensor.detach, torch.Tensor.float, lambda weight: torch.ones(2, 3) @ weight.T,
        lambda weight: torch.cat([torch.ones(1, 3), weight]), lambda weight: weight.requires_grad_(False),
        lambda weight: torch.ones(3).as_subclass(Placeholder) + weight,
    ],
)  # fmt: skip
def test_values_of_an_absent_weight_are_refused_by_name(use: Any) -> None:
    with pytest.raises(ModelError, match=r"model\.head\.weight is read where another pipeline rank has model\.head"):
        use(absent_head().weight)


class Position(nn.Module):
    """An edge with parts that a step uses in other ways than by calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(8, 4), nn.Embedding(8, 6)])
        self.width = 4

    @property
    def norm(self) -> torch.Tensor:
        return self.tables[0].weight.norm()

    def widest(self, tokens: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.tables[1](tokens), 6


def test_parts_and_methods_of_an_absent_module_tell_shapes_too() -> None:
    calls: list[str] = []
    shadow = Shadow(Position(), device=torch.device("cpu"))
    absent = Absent(shadow, name="position", on_call=lambda name, *_: calls.append(name))
    tokens = torch.zeros(2, 3, dtype=torch.long)
    assert absent and len(absent.tables) == 2 and absent.tables[1].embedding_dim == 6
    assert [table(tokens).shape[-1] for table in absent.tables] == [4, 6]
    assert calls == ["position.tables.0", "position.tables.1"]
    rows, width = absent.widest(tokens)
    assert rows.shape == (2, 3, 6) and width == 6
    assert all(isinstance(value, Placeholder) for value in (rows, absent.tables[0](tokens)))
    for use in (lambda: absent.tables[0].weight + 1, lambda: absent.norm * 2):
        with pytest.raises(ModelError, match=r"position\.(tables\.0\.weight|norm) is read where another"):
            use()


def test_settings_of_an_absent_module_are_there() -> None:
    absent = absent_head()
    assert absent.out_features == 4
    with pytest.raises(AttributeError):
        _ = absent.no_such_thing
    assert list(absent.parameters()) == []
