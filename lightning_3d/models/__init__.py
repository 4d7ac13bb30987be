"""Models to train: a compact decoder of ours, any Hugging Face causal language model, and a small classifier."""
