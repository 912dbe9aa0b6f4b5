"""The verifier: is a graph well-formed, does it keep its contract with the caller, does it compute the same numbers?

It reads and runs graphs and never edits one. `passes` calls it after each pass or stage (option `verify`).
"""
