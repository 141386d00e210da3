"""An L-GATr network on four-momenta, and its checkpoint."""

import torch
from lgatr import LGATr, embed_vector, extract_scalar

torch.manual_seed(0)
momenta = torch.randn(32, 20, 4)  # 32 events of 20 particles
attention = {"num_heads": 4}
net = LGATr(
    num_blocks=2, in_mv_channels=1, out_mv_channels=1, hidden_mv_channels=8,
    in_s_channels=0, out_s_channels=0, hidden_s_channels=16, attention=attention, mlp={},
)  # fmt: skip
torch.save(net.state_dict(), "lgatr.pt")

out, _ = net(embed_vector(momenta).unsqueeze(2), None)
result = extract_scalar(out)[..., 0].mean(1)
print(result.shape)
