"""The same network of torchweft, from the checkpoint."""

import torch

from torchweft import clifford

torch.manual_seed(0)
momenta = torch.randn(32, 20, 4)  # 32 events of 20 particles
net = clifford.LGATr(
    1, 1, 8, 0, 0, 16, blocks=2, heads=4,
    activation="gelu_tanh", options=clifford.LGATR_2, blade_dim=-1,
)  # fmt: skip
options = {"attention": {"num_heads": 4}, "mlp": {}, "primitives": {}}
net.load_state_dict(clifford.from_lgatr(torch.load("lgatr.pt"), configuration=options))

x = clifford.embed_vector(momenta.unsqueeze(2), clifford.SPACETIME, blade_dim=-1)
out, _ = net(x)
result = clifford.extract_scalar(out, clifford.SPACETIME, blade_dim=-1)[..., 0].mean(1)
print(result.shape)
