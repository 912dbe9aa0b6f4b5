"""One algebra for pieces and concatenations.

`index_map` describes which elements of a source a value has, `read` derives that from a graph, `blocks` merges
neighbouring operands of a concatenation, and `plan` finds the shortest list of view operations that computes an index
map. `rule` is the general rewrite; each split/cat pass is a special case of it.
"""
