"""What the GPU tiers share: the pipeline of stages, launches, replays."""
