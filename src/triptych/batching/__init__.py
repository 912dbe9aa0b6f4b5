"""Many small like operations as one: finding them, and building the operations over stacked values."""
