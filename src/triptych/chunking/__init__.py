"""Computes a large product, and what depends on it, in chunks of rows: which values have rows, which region can be
computed chunk by chunk, whether a gradient is proportional to the incoming gradient, and the chunks themselves."""
