"""File formats of the input, one a module; `batchrun.data.sources` chooses among them."""
