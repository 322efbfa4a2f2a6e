"""CUDA GPUs from compute capability 8.0: quantise, predict, select and attend in Triton."""
