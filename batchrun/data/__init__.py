"""Rows: where they come from, how they become prompts, and where completions go. Never imports torch."""
