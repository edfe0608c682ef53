"""The model: weights, their loading, and the forward pass over ops."""
