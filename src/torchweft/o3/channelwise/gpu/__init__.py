"""GPU kernels of channelwise products: how they are split, printed and launched."""
