"""Triptych: an open, explainable graph-optimising compiler middle-end for PyTorch."""
