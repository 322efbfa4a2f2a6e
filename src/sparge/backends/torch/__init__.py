"""Any device, in PyTorch: gathers the kept blocks for torch's own attention."""
