"""PaRO sharding of any PyTorch model: parameters, gradients and optimizer states each at their level."""
