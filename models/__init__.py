"""One file per model family; a config's model.family names the file.

A family's module has `build(model, overlap)`, which returns a function from a key to the Flax module (the module has
`loss(batch, row_B, key)` and is called on tokens), and `step_flops(model, num_sequences)`.
"""
