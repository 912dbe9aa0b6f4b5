"""One algebra for pieces and concatenations.

`index_map` says which elements of a source a value has, `read` finds that out of a graph, `join` puts such values
together, `plan` finds the fewest operations that make one. `rule` is the rewrite that all split/cat passes name
parts of.
"""
