"""Engines beside each other, the machine's limits beside them, and the scheduler without a model."""
