"""One file per model family; a config's model.family names the file.

A family's module has
- `build(model, overlap)`, which returns a function from a key to the Flax module;
- `objective(model)`, which says what it learns to predict, and so what a batch holds;
- `step_flops(model, num_sequences)`.

The Flax module has `loss(batch, row_B, key)`, which is trained on, and `evaluate(batch, row_B)`, which finds the loss
and whatever else tells a person how good the model is, by name. `loss` returns this device's sum and count, and may
return third, in the form of an evaluation, what else is to be logged at every step. If the module continues text it is
called on tokens and returns logits. The fields of `model` are those of the family's dataclass in overlapfx/families.py.
"""
