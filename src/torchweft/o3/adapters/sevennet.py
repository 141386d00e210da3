"""Models of SevenNet with convolutions, self-connections and layers of torchweft."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from torchweft.errors import DTypeError
from torchweft.o3.adapters.e3nn import made_layer, tensor_product
from torchweft.o3.adapters.interactions import (
    by_types,
    convolved,
    layout_in,
    linear_of_items,
    radial_weight,
    self_connection,
)
from torchweft.o3.adapters.model_call import Call
from torchweft.o3.adapters.replacing import all_or_nothing, holding, is_of, replace_layers
from torchweft.o3.irreps.irreps import Irreps
from torchweft.o3.layers.harmonics_and_radial import PolynomialCutoff
from torchweft.o3.tensor_product.products import TensorProductConv

__all__ = ["from_sevennet"]

Data = dict[str, Tensor]


def from_sevennet(model: nn.Module) -> nn.Module:
    """Converts a SevenNet model: torchweft computes its layers, one convolution each.

    Args:
        model: an AtomGraphSequential built on e3nn, not scripted; changed in place.

    Returns:
        The model.  Its parameters are the same tensors with the same names, so that
        optimisers keep them and checkpoints load.

    Raises:
        DTypeError: the model has no IrrepsConvolution of SevenNet, or one that was built for
            another library (cuEquivariance, FlashTP, OpenEquivariance), or a layer of e3nn with a
            parametrization.

    Error: results differ from the original's by rounding; `o3.check` measures it for your
    structure.

    Source: Park et al.: Scalable parallel algorithm for graph neural network interatomic
    potentials, JCTC 20, 4857 (2024).

    Example:
        >>> from torchweft import o3
        >>> model = o3.from_sevennet(model)  # doctest: +SKIP
        >>> atoms.calc = o3.calculator(model)  # doctest: +SKIP
    """
    modules = list(model.named_modules()) if isinstance(model, nn.Module) else []
    found = [_checked(name, m) for name, m in modules if is_of("sevenn", _FUSED, m) or _is_conv(m)]
    if not found:
        raise DTypeError(
            f"from_sevennet was given a {type(model).__name__}: it must hold layers "
            "IrrepsConvolution of SevenNet. Pass the loaded AtomGraphSequential before it is "
            "scripted, for example that of a calculator's `model`."
        )
    with all_or_nothing(model):
        _convert(model)
    return model


def _convert(model: nn.Module) -> None:
    layout, call = layout_in(model, "sevenn", _features(model)), Call()
    if layout == "ir_mul":
        _take_items_apart(model, layout)
    replace_layers(model, functools.partial(_sevennet_layer, layout=layout, call=call))
    replace_layers(model, functools.partial(made_layer, layout=layout))
    model.register_forward_pre_hook(call.begin, with_kwargs=True)
    model.register_forward_hook(call.end, always_call=True)


_FUSED = "IrrepsScatterGatterFusedConvolution"


def _is_conv(module: nn.Module) -> bool:
    return is_of("sevenn", "IrrepsConvolution", module)


def _checked(name: str, module: Any) -> nn.Module:
    """The convolution, if e3nn computes it."""
    conv = module.convolution
    if not _is_conv(module) or not is_of("e3nn", "TensorProduct", conv):
        raise DTypeError(
            f"{name} is an {type(module).__name__} with a {type(conv).__module__}."
            f"{type(conv).__name__}: from_sevennet reads instructions and weights of e3nn's "
            "products. Build the model without cuEquivariance, FlashTP and OpenEquivariance "
            "(enable_cueq, enable_flash and enable_oeq False), and convert that."
        )
    found: nn.Module = module
    return found


def _features(model: nn.Module) -> list[Any]:
    """Irreps of the rows between layers."""
    linears = (m for m in model.modules() if is_of("sevenn", "IrrepsLinear", m))
    return [irreps for m in linears for irreps in (m.irreps_in, m.irreps_out)]


def _take_items_apart(model: nn.Module, layout: str) -> None:
    """Let the linear map after each convolution read the items of its products."""
    conv: Any = None
    for module in model.modules():
        if _is_conv(module):
            conv = module
        elif is_of("sevenn", "IrrepsLinear", module) and conv is not None:
            linear: Any = module
            items = Irreps(conv.convolution.irreps_out)
            linear.linear, conv = linear_of_items(linear.linear, items, layout), None


def _sevennet_layer(module: Any, layout: str, call: Call) -> nn.Module | None:
    made: nn.Module | None = None
    if _is_conv(module):
        made = _Convolution(module, layout, call)
    elif is_of("sevenn", "SelfConnectionIntro", module) and by_types(module.fc_tensor_product):
        made = _SelfConnectionIntro(module, layout)
    elif is_of("sevenn", "PolynomialCutoff", module) and module.p == int(module.p):
        made = PolynomialCutoff(module.cutoff_length, int(module.p))
    return None if made is None else made.train(module.training)


class _Convolution(nn.Module):
    """SevenNet's IrrepsConvolution, its gather, product and sum in one.

    Args:
        of: the original; its parameters and the names of its data are kept.
        layout: of the rows.
        call: of the model.
    """

    denominator: nn.Parameter

    def __init__(self, of: Any, layout: str, call: Call) -> None:
        super().__init__()
        self.call = call
        self.register_parameter("denominator", of.denominator)
        conv = tensor_product(of.convolution, TensorProductConv, layout)
        assert isinstance(conv, TensorProductConv)
        self.convolution = conv
        holding(conv, of.convolution)
        self.weight_nn = made_layer(of.weight_nn)
        self.key_x, self.key_filter = of.key_x, of.key_filter
        self.key_weight_input, self.key_edge_idx = of.key_weight_input, of.key_edge_idx
        self.is_parallel = of.is_parallel

    def forward(self, data: Data) -> Data:
        """The data with the sums over edges in place of the features of nodes."""
        x = data[self.key_x]
        if self.is_parallel:
            x = torch.cat([x, data["x_ghost"]])
        weight = radial_weight(self.weight_nn, data[self.key_weight_input])
        graph = self.call.graph(data[self.key_edge_idx], x.shape[0], x.shape[0], src=1)
        z = convolved(self.convolution, x, data[self.key_filter], weight, graph)
        z = z / self.denominator
        data[self.key_x] = z[: data["nlocal"]] if self.is_parallel else z
        return data


class _SelfConnectionIntro(nn.Module):
    """SevenNet's layer of this name, by the types of the atoms.

    Args:
        of: the original; its weight and the names of its data are kept.
        layout: of the rows.
    """

    def __init__(self, of: Any, layout: str) -> None:
        super().__init__()
        self.fc_tensor_product = self_connection(of.fc_tensor_product, layout=layout)
        self.key_x = of.key_x

    def forward(self, data: Data) -> Data:
        """The data with the self-connection, which is added to the next features."""
        found = self.fc_tensor_product(data[self.key_x], data["atom_type"])
        data["self_cont_tmp"] = found
        return data
