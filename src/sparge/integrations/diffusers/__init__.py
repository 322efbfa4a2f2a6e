"""diffusers: pipelines, the attention dispatcher and context parallelism."""
