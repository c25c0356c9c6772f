"""What is changed inside torch: one file per target, and no decision.

`patches` lists them and applies them, `capabilities` is all that is known of torch's
releases.
"""
