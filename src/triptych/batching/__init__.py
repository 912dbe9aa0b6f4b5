"""Horizontal fusion: many small equal operations become one operation over stacked operands."""
