"""NequIP's model modifier `enable_torchweft`, for its YAML files.

    training_module:
      model:
        _target_: nequip.model.modify
        modifiers: [{modifier: enable_torchweft}]
        model: {_target_: nequip.model.NequIPGNNModel, …}

NequIP imports this module where torchweft is installed: an entry point of its group
`nequip.extension`.  It adds the modifier to NequIP's GraphModel.
"""

from __future__ import annotations

from typing import Any

from nequip.nn.graph_model import GraphModel
from nequip.nn.model_modifier_utils import model_modifier
from torch import nn

from torchweft.o3.adapters.allegro import from_allegro
from torchweft.o3.adapters.nequip import from_nequip
from torchweft.o3.adapters.replacing import is_of, rest_of_state

__all__: list[str] = []


def _enable_torchweft(cls: type, model: nn.Module) -> nn.Module:
    """Compute a model of NequIP or Allegro by torchweft, in training and inference.

    Checkpoints are those of the model without the modifier.
    """
    is_allegro = any(is_of("allegro", "Contracter", module) for module in model.modules())
    made = from_allegro(model) if is_allegro else from_nequip(model)
    made.register_state_dict_post_hook(_complete)  # type: ignore[no-untyped-call]
    return made


def _complete(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Add the tables that a state of the original has beside parameters."""
    for name, part in module.named_modules(prefix=prefix.removesuffix(".")):
        for key, table in rest_of_state(part).items():
            state[f"{name}.{key}" if name else key] = table


_marked = model_modifier(persistent=False, private=False)
GraphModel.enable_torchweft = _marked(classmethod(_enable_torchweft))
