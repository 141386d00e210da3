"""A layer of flash-clifford: linear map, GELU, geometric product and norm of multivectors."""

import torch
from modules.layer import Layer

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(8, 256, 64).to(device)  # (blades, rows, features)

layer = Layer(64, dims=3, normalize=True, use_fc=False).to(device)
torch.save(layer.state_dict(), "layer.pt")
result = layer(x)
print(result.shape)
