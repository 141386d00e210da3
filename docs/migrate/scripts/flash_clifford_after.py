"""A layer of torchweft: linear map, GELU, geometric product and norm of multivectors."""

import torch

from torchweft.clifford import CliffordLayer

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(8, 256, 64).to(device)  # (blades, rows, features)

layer = CliffordLayer(64, dims=3, normalize=True, use_fc=False).to(device)
layer.load_state_dict(torch.load("layer.pt"))
result = layer(x)
print(result.shape)
