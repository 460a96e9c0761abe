"""Packed linear layers are linear layers."""

import copy

import pytest
import torch
from torch import nn

from kvlab.models import load_model
from kvlab.packing import PackedLinear, pack_linear_layers

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch was built without oneDNN"
)


def packed_layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias)
    pack_linear_layers(layer)
    assert isinstance(layer, PackedLinear)
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 24), (3, 5, 24), (24,), (0, 24)])
def test_packed_layer_gives_the_product(bias: bool, shape: tuple[int, ...]) -> None:
    layer = packed_layer(bias)
    x = torch.randn(shape)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_changed_weight_is_packed_again() -> None:
    layer, x = packed_layer(), torch.randn(2, 24)
    layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    layer.weight.data = torch.randn(40, 24)
    torch.testing.assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_copied_layer_has_its_own_packed_weight() -> None:
    layer, x = packed_layer(), torch.randn(2, 24)
    before = layer(x)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(twin(x), layer.bias.expand(2, -1))
    assert torch.equal(layer(x), before)


def test_gradients_of_the_input_flow_through_a_packed_layer() -> None:
    layer, x = packed_layer(), torch.randn(2, 24, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(2, -1))


def test_packed_layer_follows_its_model_into_another_dtype() -> None:
    layer = packed_layer()
    layer(torch.randn(2, 24))
    assert layer.half()(torch.randn(2, 24).half()).dtype == torch.float16


def test_packed_model_is_saved_as_it_was(tmp_path) -> None:
    packed, plain = load_model(), load_model(packed=False)
    assert any(isinstance(m, PackedLinear) for m in packed.model.modules())
    assert not any(isinstance(m, PackedLinear) for m in plain.model.modules())
    saved = packed.model.state_dict()
    assert saved.keys() == plain.model.state_dict().keys()
    assert all(torch.equal(saved[k], v) for k, v in plain.model.state_dict().items())
