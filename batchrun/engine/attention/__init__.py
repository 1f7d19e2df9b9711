"""Attention over the paged KV cache: one interface, chosen by `engine.attention`."""
