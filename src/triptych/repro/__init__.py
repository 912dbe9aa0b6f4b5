"""A captured program written as a Python file that anybody can run."""
