"""transformers: ``attn_implementation="sparge"``."""
