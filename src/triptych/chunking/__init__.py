"""A large product and what is computed from it, in chunks of rows: which values have rows, which region can be computed
chunk by chunk, whether a gradient is proportional to the gradient that comes in, and the chunks themselves."""
