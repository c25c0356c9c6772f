"""The changes inside torch: one file for each.

`registry` lists and applies them; `replacing` has the means.
"""
